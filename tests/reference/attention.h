#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace spillway::reference {

// Keys and values of one KV head, [n][d].
struct KeyValues {
  int64_t n = 0;
  int d = 0;
  std::vector<double> k;
  std::vector<double> v;

  std::span<const double> Key(int64_t t) const { return {&k[t * d], size_t(d)}; }
  std::span<const double> Value(int64_t t) const { return {&v[t * d], size_t(d)}; }
};

struct Attention {
  std::vector<double> out;  // [d]
  double lse = 0;           // natural log
};

double Dot(std::span<const double> a, std::span<const double> b);
double Norm(std::span<const double> a);

// scale * q.k for the first n tokens.
std::vector<double> Logits(const KeyValues& kv, std::span<const double> q, double scale, int64_t n);

// softmax(scale * q K^T) V over the first n tokens. sink: a sink logit, whose exponential is added
// to the denominator, and so counts in the log-sum-exp; -infinity: none.
Attention DenseAttention(const KeyValues& kv, std::span<const double> q, double scale, int64_t n,
                         double sink = -std::numeric_limits<double>::infinity());

// The KV head with one row more, whose key and value are 0. With a weight of exp(s), this row is
// what a sink logit s adds.
KeyValues WithSinkRow(KeyValues kv);

// The same over chosen rows, with log_weights added to their logits.
Attention WeightedAttention(const KeyValues& kv, std::span<const double> q, double scale,
                            std::span<const uint32_t> indices, std::span<const float> log_weights);

// ||a - b|| / ||b||.
double RelativeDistance(std::span<const float> a, std::span<const double> b);

}  // namespace spillway::reference
