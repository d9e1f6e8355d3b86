#pragma once

#include <cmath>
#include <vector>

#include "tests/conformance/device_bench.h"

namespace spillway {

// One context of 8,192 tokens that resembles a real trace, on the chosen device, with several KV
// heads, queries, and their exact outputs.
struct Experiment {
  static constexpr int64_t kTokens = 8192;
  static constexpr int kKvHeads = 8;
  static constexpr int kGroup = 2;
  static constexpr int kQueries = 8;
  static constexpr int kHeadDim = 64;

  ModelSpec spec;
  reference::Context context;
  std::vector<float> q;
  DeviceBench bench;
  BenchSequence sequence;
  std::vector<int64_t> visible;
  std::vector<reference::Attention> exact;  // [T][H_q]

  explicit Experiment(int bits_per_dim = 2)
      : spec(MakeSpec(kKvHeads, kGroup, kHeadDim, DType::kBF16,
                      {.kind = HashKind::kRotation, .bits_per_dim = bits_per_dim})),
        context(reference::TraceContext(spec, kTokens, 81)),
        q(reference::TraceQueries(context, kQueries, 82, 1.2)),
        bench(ChosenDevice(), spec),
        sequence(bench),
        visible(kQueries, kTokens) {
    sequence.Append(context, 0, kTokens).IgnoreError();
    std::vector<reference::KeyValues> heads;
    for (int h = 0; h < kKvHeads; ++h) heads.push_back(context.Head(h));
    for (int t = 0; t < kQueries; ++t) {
      for (int h = 0; h < spec.query_head_count; ++h) {
        exact.push_back(reference::DenseAttention(
            heads[h / kGroup], reference::Query(spec, q, t, h), spec.softmax_scale, kTokens));
      }
    }
  }

  JobItem Attend(const Policy& policy) { return sequence.Attend(policy, q, visible); }

  // ||out - exact|| / ||exact|| of (query, head).
  double ErrorOf(const AttendResult& result, int t, int h) const {
    return reference::RelativeDistance(OutputOf(spec, result, t, h),
                                       exact[t * spec.query_head_count + h].out);
  }
};

}  // namespace spillway
