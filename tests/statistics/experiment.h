#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "tests/conformance/device_bench.h"

namespace spillway {

// One context of 8,192 tokens on the chosen device, with several KV heads, queries, and their exact
// outputs.
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

  // A context that resembles a real trace.
  explicit Experiment(int bits_per_dim = 2)
      : Experiment(reference::TraceContext(SpecOf(bits_per_dim), kTokens, 81), 1.2,
                   std::vector<int64_t>(kQueries, kTokens)) {}

  // Queries over `given` with logits of this standard deviation. seen: number of visible tokens of
  // each query.
  Experiment(reference::Context given, double logit_deviation, std::vector<int64_t> seen)
      : spec(given.spec),
        context(std::move(given)),
        q(reference::TraceQueries(context, kQueries, 82, logit_deviation)),
        bench(ChosenDevice(), spec),
        sequence(bench),
        visible(std::move(seen)) {
    sequence.Append(context, 0, kTokens).IgnoreError();
    std::vector<reference::KeyValues> heads;
    for (int h = 0; h < kKvHeads; ++h) heads.push_back(context.Head(h));
    for (int t = 0; t < kQueries; ++t) {
      for (int h = 0; h < spec.query_head_count; ++h) {
        const double sink = spec.sink_logits.empty() ? -std::numeric_limits<double>::infinity()
                                                     : spec.sink_logits[h];
        exact.push_back(reference::DenseAttention(heads[h / kGroup],
                                                  reference::Query(spec, q, t, h),
                                                  spec.softmax_scale, visible[t], sink));
      }
    }
  }

  static ModelSpec SpecOf(int bits_per_dim) {
    return MakeSpec(kKvHeads, kGroup, kHeadDim, DType::kBF16,
                    {.kind = HashKind::kRotation, .bits_per_dim = bits_per_dim});
  }

  JobItem Attend(const Policy& policy) { return sequence.Attend(policy, q, visible); }

  // ||out - exact|| / ||exact|| of (query, head).
  double ErrorOf(const AttendResult& result, int t, int h) const {
    return reference::RelativeDistance(OutputOf(spec, result, t, h),
                                       exact[t * spec.query_head_count + h].out);
  }
};

}  // namespace spillway
