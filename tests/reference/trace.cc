#include "tests/reference/trace.h"

#include <cmath>
#include <random>

#include "tests/reference/elements.h"

namespace spillway::reference {
namespace {

constexpr int kRank = 12;
// Seeds of the data that the queries of a KV head share with its keys.
uint64_t DirectionSeed(uint64_t h) { return 7919 * (h + 1); }

// kRank directions [kRank][d], about unit length, largest first.
std::vector<double> Directions(int d, int kv_head) {
  std::mt19937_64 random(DirectionSeed(kv_head));
  std::normal_distribution<double> normal;
  std::vector<double> directions(static_cast<size_t>(kRank) * d);
  for (double& x : directions) x = normal(random) / std::sqrt(d);
  return directions;
}

double DirectionScale(int r) { return 3.0 / std::sqrt(1.0 + r); }

Context Empty(const ModelSpec& spec, int64_t n) {
  Context c{spec, n, {}, {}};
  c.k.resize(static_cast<size_t>(spec.kv_head_count) * n * spec.head_dim);
  c.v.resize(c.k.size());
  return c;
}

}  // namespace

KeyValues Context::Head(int kv_head) const {
  const size_t size = static_cast<size_t>(n) * spec.head_dim;
  const size_t at = size * kv_head;
  return {n,
          spec.head_dim,
          {k.begin() + at, k.begin() + at + size},
          {v.begin() + at, v.begin() + at + size}};
}

Context GaussianContext(const ModelSpec& spec, int64_t n, uint64_t seed) {
  Context c = Empty(spec, n);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (float& x : c.k) x = static_cast<float>(Round(spec.dtype, normal(random)));
  for (float& x : c.v) x = static_cast<float>(Round(spec.dtype, normal(random)));
  return c;
}

Context TraceContext(const ModelSpec& spec, int64_t n, uint64_t seed) {
  Context c = Empty(spec, n);
  const int d = spec.head_dim;
  for (int h = 0; h < spec.kv_head_count; ++h) {
    std::mt19937_64 random(seed * 1000003 + h);
    std::normal_distribution<double> normal;
    const std::vector<double> directions = Directions(d, h);
    std::vector<double> key_mean(d), value_mean(d), mix(static_cast<size_t>(kRank) * d);
    for (double& x : key_mean) x = normal(random);
    for (double& x : value_mean) x = 0.5 * normal(random);
    for (double& x : mix) x = 0.15 * normal(random);
    for (int64_t t = 0; t < n; ++t) {
      // A token's strength multiplies all its directions. It is log-normal, so a few tokens are
      // outliers.
      const double strength = std::exp(0.3 * normal(random));
      double a[kRank];
      for (double& x : a) x = strength * normal(random);
      for (int i = 0; i < d; ++i) {
        double k = key_mean[i] + 0.15 * normal(random);
        double v = value_mean[i] + 0.5 * normal(random);
        for (int r = 0; r < kRank; ++r) {
          k += DirectionScale(r) * a[r] * directions[r * d + i];
          v += a[r] * mix[r * d + i];
        }
        const size_t at = (static_cast<size_t>(h) * n + t) * d + i;
        c.k[at] = static_cast<float>(Round(spec.dtype, k));
        c.v[at] = static_cast<float>(Round(spec.dtype, v));
      }
    }
  }
  return c;
}

std::vector<float> GaussianQueries(const ModelSpec& spec, int64_t query_count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(query_count * spec.query_head_count * spec.head_dim);
  for (float& x : q) x = normal(random);
  return q;
}

std::vector<float> TraceQueries(const Context& context, int64_t query_count, uint64_t seed,
                                double logit_deviation) {
  const ModelSpec& spec = context.spec;
  const int d = spec.head_dim;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<float> q(query_count * spec.query_head_count * d);
  for (int h = 0; h < spec.query_head_count; ++h) {
    const int kv_head = h / spec.query_heads_per_kv_head();
    const std::vector<double> directions = Directions(d, kv_head);
    const KeyValues kv = context.Head(kv_head);
    for (int64_t t = 0; t < query_count; ++t) {
      std::vector<double> x(d);
      for (double& e : x) e = 0.2 * normal(random) / std::sqrt(d);
      for (int r = 0; r < kRank; ++r) {
        const double b = normal(random) / std::sqrt(1.0 + r);
        for (int i = 0; i < d; ++i) x[i] += b * directions[r * d + i];
      }
      const std::vector<double> logits = Logits(kv, x, spec.softmax_scale, context.n);
      double mean = 0, square = 0;
      for (double l : logits) mean += l / context.n;
      for (double l : logits) square += (l - mean) * (l - mean) / context.n;
      for (int i = 0; i < d; ++i) {
        q[(t * spec.query_head_count + h) * d + i] =
            static_cast<float>(x[i] * logit_deviation / std::sqrt(square));
      }
    }
  }
  return q;
}

std::vector<double> Query(const ModelSpec& spec, const std::vector<float>& q, int64_t t, int h) {
  const auto at = q.begin() + (t * spec.query_head_count + h) * spec.head_dim;
  return {at, at + spec.head_dim};
}

}  // namespace spillway::reference
