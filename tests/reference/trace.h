#pragma once

#include <cstdint>
#include <vector>

#include "host/model/model_spec.h"
#include "tests/reference/attention.h"

namespace spillway::reference {

// K/V of one layer, rounded to the model's dtype.
struct Context {
  ModelSpec spec;
  int64_t n = 0;
  std::vector<float> k;  // [H_kv][n][d]
  std::vector<float> v;

  KeyValues Head(int kv_head) const;
};

// Independent standard normal keys and values.
Context GaussianContext(const ModelSpec& spec, int64_t n, uint64_t seed);

// Data with the properties of real models' K/V that matter for sampling: keys of low rank about a
// large mean; logits whose spread leaves a few thousand tokens with weight, and a heavy right tail;
// values about a mean, and partly a function of the key. With Gaussian K/V, every row would be
// needed: their attention is flat and their output near zero.
Context TraceContext(const ModelSpec& spec, int64_t n, uint64_t seed);

// Standard normal queries [T][H_q][d].
std::vector<float> GaussianQueries(const ModelSpec& spec, int64_t query_count, uint64_t seed);
// Queries in the span of the keys' large directions. Their logits over the context have the
// standard deviation logit_deviation.
std::vector<float> TraceQueries(const Context& context, int64_t query_count, uint64_t seed,
                                double logit_deviation);

// Query t of query head h, in fp64.
std::vector<double> Query(const ModelSpec& spec, const std::vector<float>& q, int64_t t, int h);

}  // namespace spillway::reference
