#include "tests/conformance/expect_weighted.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "host/core/degrees.h"
#include "tests/conformance/scored_end.h"
#include "tests/reference/page_index.h"

namespace spillway {
namespace {

// The unit of the values. An output whose norm is below 1/16 of it promises nothing
// (kOutputNormMin).
double ValueUnit(const reference::KeyValues& kv, const ModelSpec& spec) {
  return spec.hash.kind == HashKind::kRotation ? reference::PageIndex::Of(kv).value_unit : 1;
}

std::vector<double> ProjectionSignsOf(const Policy& policy, int d) {
  const ProjectionSigns signs = ProjectionSigns::Of(policy.seed);
  std::vector<double> of_dims(d);
  for (int i = 0; i < d; ++i) of_dims[i] = signs.negative(i) ? -1 : 1;
  return of_dims;
}

}  // namespace

SelectionParts SplitSelection(const Selection& selection) {
  SelectionParts parts;
  std::map<int, reference::SampledTokens> strata;
  std::map<int, double> weight;
  for (size_t i = 0; i < selection.indices.size(); ++i) {
    if (selection.strata[i] < kStratumTail) {
      EXPECT_EQ(selection.log_weights[i], 0);
      parts.exact.push_back(selection.indices[i]);
      continue;
    }
    strata[selection.strata[i]].tokens.push_back(selection.indices[i]);
    weight[selection.strata[i]] = std::exp(selection.log_weights[i]);
  }
  for (auto& [id, s] : strata) {
    s.token_count = std::llround(weight[id] * static_cast<double>(s.tokens.size()));
    parts.strata.push_back(s);
  }
  return parts;
}

void ExpectWeighted(const reference::Context& context, const std::vector<float>& q,
                    const Policy& policy, bool promises, const JobItem& attend,
                    const JobItem& select, const std::string& what) {
  ASSERT_TRUE(attend.status.ok()) << what << ": " << attend.status;
  ASSERT_TRUE(select.status.ok()) << what << ": " << select.status;
  const ModelSpec& spec = context.spec;
  const AttendQuery& queries = *attend.attend;
  const AttendResult& result = attend.result;
  // vAttention's lemmas do not rest on ranks, and treat the error as one-dimensional.
  const bool rests_on_ranks = policy.tail == Tail::kStratified || policy.bound == Bound::kRatio;
  const std::vector<double> signs = ProjectionSignsOf(policy, spec.head_dim);
  for (int h = 0; h < spec.query_head_count; ++h) {
    const int kv_head = h / spec.query_heads_per_kv_head();
    const double unit = ValueUnit(context.Head(kv_head), spec);
    const auto sink_row = static_cast<uint32_t>(context.n);
    const reference::KeyValues kv = reference::WithSinkRow(context.Head(kv_head));
    const float sink =
        spec.sink_logits.empty() ? -std::numeric_limits<float>::infinity() : spec.sink_logits[h];
    for (int64_t t = 0; t < queries.query_count; ++t) {
      const int64_t n = queries.visible[t];
      const int64_t end = ScoredEnd(spec, policy, n);
      const Selection& s = select.result.selections[t * spec.group_count() + h / spec.group()];
      ASSERT_TRUE(std::is_sorted(s.indices.begin(), s.indices.end(), std::less_equal<>())) << what;
      ASSERT_EQ(s.indices.size(), s.log_weights.size());
      ASSERT_EQ(s.indices.size(), s.strata.size());
      ASSERT_LT(s.indices.back(), n);
      for (size_t i = 0; i < s.indices.size(); ++i) {
        const int64_t token = s.indices[i];
        EXPECT_EQ(s.strata[i] == kStratumSink, token < policy.sink_token_count);
        EXPECT_EQ(s.strata[i] == kStratumWindow, token >= end);
      }
      EXPECT_EQ(result.touched_row_counts[t * spec.group_count() + h / spec.group()],
                static_cast<int64_t>(s.indices.size()));
      const std::vector<double> query = reference::Query(spec, q, t, h);
      std::vector<uint32_t> indices = s.indices;
      std::vector<float> log_weights = s.log_weights;
      indices.push_back(sink_row);
      log_weights.push_back(sink);
      const reference::Attention wanted =
          reference::WeightedAttention(kv, query, spec.softmax_scale, indices, log_weights);
      ASSERT_LT(reference::RelativeDistance(OutputOf(spec, result, t, h), wanted.out), 2e-5)
          << what << " query " << t << " head " << h;
      const int64_t at = t * spec.query_head_count + h;
      ASSERT_NEAR(result.lse[at], wanted.lse, 5e-5) << what;

      SelectionParts parts = SplitSelection(s);
      const Certificate& c = result.certificates[at];
      EXPECT_EQ(c.visible_token_count, n);
      EXPECT_EQ(c.heavy_token_count, std::count(s.strata.begin(), s.strata.end(), kStratumHeavy));
      EXPECT_EQ(c.heavy_token_count + c.sampled_token_count + policy.sink_token_count + (n - end),
                static_cast<int64_t>(s.indices.size()));
      if (c.promise == Promise::kExact || parts.strata.empty()) continue;
      parts.exact.push_back(sink_row);
      std::vector<double> logits = reference::Logits(kv, query, spec.softmax_scale, kv.n);
      logits[sink_row] = sink;
      const reference::Estimate e =
          reference::EstimateOutput(kv, logits, parts.exact, parts.strata, signs);
      const double z = rests_on_ranks ? reference::ErrorQuantile(e.degrees, policy.delta)
                                      : reference::TwoSidedQuantile(policy.delta);
      const double error = z * std::sqrt(e.variance / e.norm_sq_unbiased);
      const double row_denominator = e.denominator - std::exp(sink - e.max);
      ASSERT_GT(reference::Norm(e.numerator) / row_denominator, unit / 16) << what;
      // Certificates do not state a smaller error than this one.
      const double least = std::min(1.0 / 64, std::exp2(std::floor(std::log2(policy.epsilon))));
      const double stated = std::max(error, least);
      EXPECT_NEAR(c.relative_error, stated, 2e-3 * stated) << what << " degrees " << e.degrees;
      EXPECT_NEAR(c.tail_mass, 1 - e.exact_denominator / e.denominator, 1e-4) << what;
      // If the error is so close to epsilon that fp32 may decide otherwise, both answers are right.
      if (std::fabs(error - policy.epsilon) > 0.01 * error) {
        EXPECT_EQ(c.promise,
                  promises && error <= policy.epsilon ? Promise::kStatistical : Promise::kNone)
            << what << " error " << error;
      }
    }
  }
}

}  // namespace spillway
