#include "tests/reference/methods.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "tests/reference/elements.h"

namespace spillway::reference {
namespace {

// The distance of x to the nearest number that fp16 rounds to another result, as a fraction of x.
double HalfMargin(double x) {
  if (!(x > 0)) return 1;
  const double quantum = std::ldexp(1, std::max(std::ilogb(x), -14) - 10);
  return (quantum / 2 - std::fabs(x - Round(DType::kF16, x))) / x;
}

}  // namespace

Int4Vector QuantiseInt4(std::span<const double> x) {
  const auto [min, max] = std::minmax_element(x.begin(), x.end());
  const double scale = (*max - *min) / 15;
  Int4Vector out;
  out.zero = Round(DType::kF16, *min);
  out.scale = Round(DType::kF16, scale);
  out.scale_margin = HalfMargin(scale);
  out.border_distance = std::numeric_limits<double>::infinity();
  for (const double e : x) {
    const double at = out.scale > 0 ? (e - out.zero) / out.scale : 0;
    out.levels.push_back(static_cast<int>(std::clamp(std::nearbyint(at), 0.0, 15.0)));
    // Beyond the outermost border the level no longer changes.
    const double border = std::clamp(std::floor(at), 0.0, 14.0) + 0.5;
    // An exact tie, which is common if elements have few bits, goes to the even level in any
    // arithmetic.
    const bool tie = at == border && static_cast<float>(e - out.zero) == e - out.zero;
    if (!tie) out.border_distance = std::min(out.border_distance, std::fabs(at - border));
  }
  return out;
}

double Int4Dot(const Int4Vector& x, std::span<const double> q) {
  double sum = 0;
  for (size_t i = 0; i < q.size(); ++i) sum += q[i] * (x.zero + x.scale * x.levels[i]);
  return sum;
}

std::vector<double> Chosen(std::span<const double> x, std::span<const int> channels) {
  std::vector<double> out;
  for (const int c : channels) out.push_back(x[c]);
  return out;
}

std::vector<double> PageBounds(const KeyValues& kv, std::span<const double> q, double scale,
                               int64_t page_token_count, int64_t n) {
  std::vector<double> bounds(n);
  for (int64_t begin = 0; begin < n; begin += page_token_count) {
    const int64_t end = std::min(n, begin + page_token_count);
    double sum = 0;
    for (int c = 0; c < kv.d; ++c) {
      double min = kv.Key(begin)[c], max = min;
      for (int64_t t = begin; t < end; ++t) {
        min = std::min(min, kv.Key(t)[c]);
        max = std::max(max, kv.Key(t)[c]);
      }
      sum += std::max(q[c] * min, q[c] * max);
    }
    std::fill(bounds.begin() + begin, bounds.begin() + end, scale * sum);
  }
  return bounds;
}

double TwoHitProbability(double cosine, int bits, int table_count) {
  const double angle = std::acos(std::clamp(cosine, -1.0, 1.0));
  const double p = std::pow(1 - angle / std::numbers::pi, bits);
  return 1 - std::pow(1 - p, table_count) - table_count * p * std::pow(1 - p, table_count - 1);
}

std::vector<double> Projected(std::span<const double> x, std::span<const float> projections) {
  const size_t count = projections.size() / x.size();
  std::vector<double> y(count, 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < count; ++j) y[j] += x[i] * projections[i * count + j];
  }
  return y;
}

BinRange SharedBuckets(std::span<const double> key, double key_tolerance,
                       std::span<const double> query, double query_tolerance, int bits) {
  BinRange shared;
  for (size_t first = 0; first < key.size(); first += bits) {
    bool same = true, open = false;
    for (size_t j = first; j < first + bits; ++j) {
      if (std::fabs(key[j]) < key_tolerance || std::fabs(query[j]) < query_tolerance) {
        open = true;
      } else {
        same &= (key[j] > 0) == (query[j] > 0);
      }
    }
    shared.low += same && !open;
    shared.high += same;
  }
  return shared;
}

SampledAttention AttendSampled(const KeyValues& kv, std::span<const double> q, double scale,
                               std::span<const uint32_t> exact, std::span<const uint32_t> sampled,
                               std::span<const double> probabilities) {
  std::vector<uint32_t> rows(exact.begin(), exact.end());
  rows.insert(rows.end(), sampled.begin(), sampled.end());
  std::vector<double> logits;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double weight = i < exact.size() ? 1 : 1 / (probabilities[i - exact.size()] + 1e-4);
    logits.push_back(scale * Dot(q, kv.Key(rows[i])) + std::log(weight));
  }
  const double max = *std::max_element(logits.begin(), logits.end());
  double all = 0, tail = 0;
  std::vector<double> out(kv.d, 0.0);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double x = std::exp(logits[i] - max);
    all += x;
    if (i >= exact.size()) tail += x;
    for (int j = 0; j < kv.d; ++j) out[j] += x * kv.Value(rows[i])[j];
  }
  for (double& o : out) o /= all;
  return {{std::move(out), max + std::log(all)}, tail / all};
}

std::vector<double> HashMlp::Output(std::span<const double> x) const {
  std::vector<double> in(x.begin(), x.end());
  for (size_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    std::vector<double> out(layer.bias.begin(), layer.bias.end());
    for (size_t i = 0; i < in.size(); ++i) {
      for (size_t j = 0; j < out.size(); ++j) out[j] += in[i] * layer.weights[i * out.size() + j];
    }
    for (double& z : out) {
      if (l + 1 < layers.size()) z /= 1 + std::exp(-z);
    }
    in = std::move(out);
  }
  return in;
}

}  // namespace spillway::reference
