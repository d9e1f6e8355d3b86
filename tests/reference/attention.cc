#include "tests/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace spillway::reference {

double Dot(std::span<const double> a, std::span<const double> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

double Norm(std::span<const double> a) { return std::sqrt(Dot(a, a)); }

std::vector<double> Logits(const KeyValues& kv, std::span<const double> q, double scale,
                           int64_t n) {
  std::vector<double> logits(n);
  for (int64_t t = 0; t < n; ++t) logits[t] = scale * Dot(q, kv.Key(t));
  return logits;
}

Attention DenseAttention(const KeyValues& kv, std::span<const double> q, double scale, int64_t n,
                         double sink) {
  std::vector<uint32_t> all(n);
  std::iota(all.begin(), all.end(), 0u);
  Attention result = WeightedAttention(kv, q, scale, all, std::vector<float>(n, 0.0f));
  // The rows' share of the denominator is 1 / (1 + exp(sink - lse)).
  const double rest = 1 + std::exp(sink - result.lse);
  for (double& o : result.out) o /= rest;
  result.lse += std::log(rest);
  return result;
}

KeyValues WithSinkRow(KeyValues kv) {
  ++kv.n;
  kv.k.resize(kv.k.size() + kv.d);
  kv.v.resize(kv.v.size() + kv.d);
  return kv;
}

Attention WeightedAttention(const KeyValues& kv, std::span<const double> q, double scale,
                            std::span<const uint32_t> indices, std::span<const float> log_weights) {
  std::vector<double> logits(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    logits[i] = scale * Dot(q, kv.Key(indices[i])) + log_weights[i];
  }
  const double max = *std::max_element(logits.begin(), logits.end());
  Attention result;
  result.out.assign(kv.d, 0.0);
  double denominator = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    const double x = std::exp(logits[i] - max);
    denominator += x;
    for (int j = 0; j < kv.d; ++j) result.out[j] += x * kv.Value(indices[i])[j];
  }
  for (double& o : result.out) o /= denominator;
  result.lse = max + std::log(denominator);
  return result;
}

double RelativeDistance(std::span<const float> a, std::span<const double> b) {
  std::vector<double> difference(b.size());
  for (size_t i = 0; i < b.size(); ++i) difference[i] = a[i] - b[i];
  return Norm(difference) / Norm(b);
}

}  // namespace spillway::reference
