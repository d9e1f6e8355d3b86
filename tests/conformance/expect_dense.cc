#include "tests/conformance/expect_dense.h"

#include <gtest/gtest.h>

#include <limits>

namespace spillway {

Policy All() {
  Policy policy;
  policy.selector = Selector::kAll;
  return policy;
}

void ExpectDense(const reference::Context& context, const JobItem& item,
                 const std::vector<float>& q, const std::string& what, int layer) {
  ASSERT_TRUE(item.status.ok()) << what << ": " << item.status;
  const ModelSpec& spec = context.spec;
  const AttendQuery& attend = *item.attend;
  const AttendResult& result = item.result;
  for (int h = 0; h < spec.query_head_count; ++h) {
    const reference::KeyValues kv = context.Head(h / spec.query_heads_per_kv_head());
    for (int64_t t = 0; t < attend.query_count; ++t) {
      const int64_t n = attend.visible[t];
      const double sink = spec.sink_logits.empty()
                              ? -std::numeric_limits<double>::infinity()
                              : spec.sink_logits[layer * spec.query_head_count + h];
      const reference::Attention wanted = reference::DenseAttention(
          kv, reference::Query(spec, q, t, h), spec.softmax_scale, n, sink);
      ASSERT_LT(reference::RelativeDistance(OutputOf(spec, result, t, h), wanted.out), 2e-5)
          << what << " n " << n << " query " << t << " head " << h;
      const int64_t at = t * spec.query_head_count + h;
      ASSERT_NEAR(result.lse[at], wanted.lse, 2e-5) << what << " n " << n << " head " << h;
      EXPECT_EQ(result.certificates[at].promise, Promise::kExact);
      EXPECT_EQ(result.certificates[at].relative_error, 0);
      EXPECT_EQ(result.certificates[at].visible_token_count, n);
      EXPECT_EQ(result.touched_row_counts[t * spec.group_count() + h / spec.group()], n);
    }
  }
}

void ExpectStepsAppendAndAttend(const DeviceFactory& device, const ModelSpec& spec) {
  DeviceBench bench(device, spec);
  const reference::Context context = reference::TraceContext(spec, 4300, 11);
  const std::vector<float> q = reference::TraceQueries(context, 1, 12, 1.5);
  BenchSequence steps(bench), whole(bench);
  ASSERT_TRUE(steps.Append(context, 0, 4299).ok());
  ASSERT_TRUE(whole.Append(context, 0, 4300).ok());
  for (const Policy& policy : {DefaultPolicy(spec), All()}) {
    const JobItem step = steps.Step(context, policy, q);
    ASSERT_TRUE(step.status.ok()) << step.status;
    EXPECT_EQ(step.result.out, whole.Attend(policy, q).result.out);
    steps.Truncate(4299);
  }
}

}  // namespace spillway
