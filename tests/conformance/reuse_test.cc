// Policy::reuse_deviations: what an attend found sets the next one's first
// draw, and no promise is weaker for it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/statistics/proportion.h"

namespace spillway {
namespace {

using reference::Context;

class Reuse : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 4000;
  static constexpr int kSteps = 60;

  Reuse()
      : spec_(MakeSpec(4, 2, 64, DType::kBF16)),
        bench_(GetParam(), spec_),
        context_(reference::TraceContext(spec_, kTokens + kSteps, 91)),
        policy_(DefaultPolicy(spec_)) {
    policy_.reuse_deviations = true;
    plain_ = policy_;
    plain_.reuse_deviations = false;
  }

  BenchSequence Sequence(int64_t token_count) {
    BenchSequence sequence(bench_);
    EXPECT_TRUE(sequence.Append(context_, 0, token_count).ok());
    return sequence;
  }
  std::vector<float> Queries(uint64_t seed) const {
    return reference::TraceQueries(context_, 1, seed, 1.5);
  }
  static void ExpectSame(const JobItem& a, const JobItem& b, const std::string& what) {
    ASSERT_TRUE(a.status.ok() && b.status.ok()) << what << a.status << b.status;
    EXPECT_EQ(a.attend->out, b.attend->out) << what;
    EXPECT_EQ(a.attend->lse, b.attend->lse) << what;
    EXPECT_EQ(a.attend->touched_row_counts, b.attend->touched_row_counts) << what;
    for (size_t i = 0; i < a.attend->certificates.size(); ++i) {
      EXPECT_EQ(a.attend->certificates[i].relative_error, b.attend->certificates[i].relative_error);
      EXPECT_EQ(a.attend->certificates[i].promise, b.attend->certificates[i].promise) << what;
    }
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  const Context context_;
  Policy policy_;
  Policy plain_;
};

TEST_P(Reuse, TheFirstAttendIsAsWithoutAndLaterOnesAreNot) {
  BenchSequence sequence = Sequence(kTokens), other = Sequence(kTokens);
  int64_t differing = 0;
  for (int step = 0; step < 5; ++step) {
    const std::vector<float> q = Queries(100 + step);
    const JobItem a = sequence.Attend(policy_, q), b = other.Attend(plain_, q);
    if (step == 0) ExpectSame(a, b, "first");
    differing += a.attend->touched_row_counts != b.attend->touched_row_counts;
  }
  EXPECT_GT(differing, 0);
}

// An attend draws as the one before the append found, not as one that knows
// nothing: what a decoding loop does.
TEST_P(Reuse, AnAppendForgetsNothing) {
  BenchSequence sequence = Sequence(kTokens), fresh = Sequence(kTokens);
  for (int i = 0; i < 3; ++i) sequence.Attend(policy_, Queries(150 + i));
  ASSERT_TRUE(sequence.Append(context_, kTokens, kTokens + 1).ok());
  ASSERT_TRUE(fresh.Append(context_, kTokens, kTokens + 1).ok());
  const std::vector<float> q = Queries(160);
  const JobItem a = sequence.Attend(policy_, q), b = fresh.Attend(policy_, q);
  ASSERT_TRUE(a.status.ok() && b.status.ok()) << a.status << b.status;
  EXPECT_NE(a.attend->touched_row_counts, b.attend->touched_row_counts);
}

// Each of a group's first query heads counts: those of a group fail together.
TEST_P(Reuse, PromisesHoldStepAfterStep) {
  for (const double epsilon : {0.1, 0.05}) {
    policy_.epsilon = epsilon;
    BenchSequence sequence = Sequence(kTokens);
    int64_t draws = 0, beyond_epsilon = 0, beyond_estimate = 0, promised = 0, touched = 0;
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<float> q = Queries(200 + step);
      policy_.seed = step;
      const JobItem item = sequence.Step(context_, policy_, q);
      ASSERT_TRUE(item.status.ok()) << item.status;
      const int64_t n = kTokens + step + 1;
      for (int g = 0; g < spec_.kv_head_count; ++g) {
        const int h = g * spec_.group();
        const reference::Attention exact = reference::DenseAttention(
            context_.Head(g), reference::Query(spec_, q, 0, h), spec_.softmax_scale, n);
        const double error =
            reference::RelativeDistance(OutputOf(spec_, *item.attend, 0, h), exact.out);
        const Certificate& c = item.attend->certificates[h];
        ++draws;
        beyond_epsilon += error > epsilon;
        beyond_estimate += error > c.relative_error;
        promised += c.promise != Promise::kNone;
        touched += item.attend->touched_row_counts[g];
      }
    }
    EXPECT_LE(WilsonInterval(beyond_epsilon, draws).low, policy_.delta) << epsilon;
    EXPECT_LE(WilsonInterval(beyond_estimate, draws).low, policy_.delta) << epsilon;
    EXPECT_GT(promised, draws * 8 / 10) << epsilon;
    EXPECT_LT(touched, draws * kTokens * 6 / 10) << epsilon;
  }
}

TEST_P(Reuse, ATruncatedSequenceForgets) {
  const std::vector<float> q = Queries(300);
  BenchSequence sequence = Sequence(kTokens);
  for (int i = 0; i < 3; ++i) sequence.Attend(policy_, Queries(301 + i));
  sequence.Truncate(kTokens - 1);
  ASSERT_TRUE(sequence.Append(context_, kTokens - 1, kTokens).ok());
  ExpectSame(sequence.Attend(policy_, q), Sequence(kTokens).Attend(plain_, q), "truncated");
}

TEST_P(Reuse, AForkStartsAnew) {
  const std::vector<float> q = Queries(310);
  BenchSequence sequence = Sequence(kTokens);
  for (int i = 0; i < 3; ++i) sequence.Attend(policy_, Queries(311 + i));
  BenchSequence fork = sequence.Fork(kTokens);
  const JobItem wanted = Sequence(kTokens).Attend(plain_, q);
  ExpectSame(fork.Attend(policy_, q), wanted, "fork");
}

// Only an attend of one query over all tokens remembers and is told; the rest
// is as without.
TEST_P(Reuse, OtherAttendsNeitherReadNorWrite) {
  BenchSequence sequence = Sequence(kTokens);
  const std::vector<float> q = Queries(320);
  const std::vector<float> two = reference::TraceQueries(context_, 2, 321, 1.5);
  const std::vector<int64_t> visible = {kTokens - 500};
  for (int round = 0; round < 2; ++round) {
    const std::string what = round == 0 ? "before" : "after";
    ExpectSame(sequence.Attend(policy_, two), sequence.Attend(plain_, two), what + " two queries");
    ExpectSame(sequence.Attend(policy_, q, visible), sequence.Attend(plain_, q, visible),
               what + " an attend from before the newest tokens");
    const JobItem a = sequence.Select(policy_, q), b = sequence.Select(plain_, q);
    ASSERT_TRUE(a.status.ok() && b.status.ok());
    for (size_t i = 0; i < a.attend->selections.size(); ++i) {
      EXPECT_EQ(a.attend->selections[i].indices, b.attend->selections[i].indices) << what;
    }
    if (round == 0) ExpectSame(sequence.Attend(policy_, q), sequence.Attend(plain_, q), "first");
  }
}

// As the audit asks for it: a head that is served by another tail.
TEST_P(Reuse, AHeadOfAnotherTailDoesNotReuse) {
  Policy uniform = policy_;
  uniform.tail = Tail::kUniform;
  uniform.bound = Bound::kPaper;
  BenchSequence sequence = Sequence(kTokens), other = Sequence(kTokens);
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> q = Queries(340 + i);
    const auto run = [&](BenchSequence& s, const Policy& policy) {
      JobItem item = s.AttendItem(policy, q, /*select_only=*/false);
      // First a stratified one, so that there is something to mistake.
      if (i > 0) item.attend->head_policies.assign(spec_.kv_head_count, uniform);
      return s.RunOne(std::move(item));
    };
    ExpectSame(run(sequence, policy_), run(other, plain_), "attend " + std::to_string(i));
  }
}

TEST_P(Reuse, RowCountMaxIsKept) {
  BenchSequence sequence = Sequence(kTokens);
  policy_.epsilon = 0.02;
  sequence.Attend(policy_, Queries(330));
  policy_.row_count_max = 700;
  for (int i = 0; i < 20; ++i) {
    policy_.seed = i;
    const JobItem item = sequence.Attend(policy_, Queries(331 + i));
    ASSERT_TRUE(item.status.ok()) << item.status;
    for (const int64_t touched : item.attend->touched_row_counts) ASSERT_LE(touched, 700);
    for (const Certificate& c : item.attend->certificates) {
      if (c.relative_error > policy_.epsilon) {
        EXPECT_EQ(c.promise, Promise::kNone);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Reuse, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
