#include "host/policy/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "host/policy/methods.h"
#include "tests/host/policy/policy_cases.h"

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::IsEmpty;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

class BadPolicy : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadPolicy, NamesTheField) { ExpectRefused(GetParam()); }

void Count(Policy& p, int64_t count) {
  p.heavy_kind = HeavyKind::kCount;
  p.heavy_count = count;
}
void Fraction(Policy& p, double f) {
  p.heavy_kind = HeavyKind::kFraction;
  p.heavy_fraction = f;
}

INSTANTIATE_TEST_SUITE_P(
    Policy, BadPolicy,
    ::testing::Values(
        BadCase{"sink_token_count", [](Policy& p) { p.sink_token_count = -1; }},
        BadCase{"sink_token_count", [](Policy& p) { p.sink_token_count = (1 << 20) + 1; }},
        BadCase{"window_token_count", [](Policy& p) { p.window_token_count = 0; }},
        BadCase{"dense_token_count", [](Policy& p) { p.dense_token_count = 1023; }},
        BadCase{"dense_token_count", [](Policy& p) { p.dense_token_count = int64_t{1} << 41; }},
        BadCase{"dense_layers.layers",
                [](Policy& p) {
                  p.dense_layers = {0, 4};
                }},
        BadCase{"dense_layers.layers", [](Policy& p) { p.dense_layers = {-1}; }},
        BadCase{"dense_layers.layers",
                [](Policy& p) {
                  p.dense_layers = {2, 0, 2};
                }},
        BadCase{"selector", [](Policy& p) { p.selector = static_cast<Selector>(17); }},
        BadCase{"top_k.count", [](Policy& p) { Count(p, -1); }},
        BadCase{"top_k.count", [](Policy& p) { Count(p, int64_t{1} << 31); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 0); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 1.5); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, kNan); }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 0; }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 1.01; }},
        BadCase{"top_p.floor_token_count", [](Policy& p) { Mass(p), p.heavy_floor = 0; }},
        BadCase{"top_p.ceiling_token_count", [](Policy& p) { Mass(p), p.heavy_ceiling = 63; }},
        BadCase{"tail", [](Policy& p) { p.tail = static_cast<Tail>(4); }},
        BadCase{"bound", [](Policy& p) { p.bound = static_cast<Bound>(3); }},
        BadCase{"epsilon", [](Policy& p) { p.epsilon = 0; }},
        BadCase{"epsilon", [](Policy& p) { p.epsilon = 1; }},
        BadCase{"epsilon", [](Policy& p) { p.epsilon = kNan; }},
        BadCase{"delta", [](Policy& p) { p.delta = 0; }},
        BadCase{"delta", [](Policy& p) { p.delta = 0.21; }},
        BadCase{"delta", [](Policy& p) { p.delta = 0.3, p.bound = Bound::kDenominator; }},
        BadCase{"delta", [](Policy& p) { p.delta = 0.3, p.tail = Tail::kUniform; }},
        BadCase{"pilot_token_count", [](Policy& p) { p.pilot_token_count = 15; }},
        BadCase{"pilot_token_count", [](Policy& p) { p.pilot_token_count = 65537; }},
        BadCase{"inflation", [](Policy& p) { p.inflation = 0.99; }},
        BadCase{"inflation", [](Policy& p) { p.inflation = kInf; }},
        BadCase{"inflation", [](Policy& p) { p.inflation = kNan; }},
        // sink, an open page of 127, heavy tokens, pilot
        BadCase{"row_count_max", [](Policy& p) { p.row_count_max = 64 + 127 + 64 + 15; }},
        BadCase{"row_count_max",
                [](Policy& p) { Count(p, 256), p.row_count_max = 64 + 127 + 256 + 15; }},
        BadCase{"row_count_max", [](Policy& p) { Mass(p), p.row_count_max = 64 + 127 + 64 + 15; }},
        BadCase{
            "row_count_max",
            [](Policy& p) { p.window_token_count = 300, p.row_count_max = 64 + 300 + 64 + 15; }},
        BadCase{"top_k", [](Policy& p) { p.heavy_kind = static_cast<HeavyKind>(4); }},
        BadCase{"row_count_max", [](Policy& p) { p.row_count_max = -1; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kInt4Keys; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kQuest; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kDoubleSparsity; }},
        BadCase{"tail", [](Policy& p) { p.tail = Tail::kLshSampling; }}));

TEST(Policy, DefaultsFitEveryKindOfModel) {
  for (const auto& [kind, selector] : {std::pair(HashKind::kRotation, Selector::kAsymmetric),
                                       std::pair(HashKind::kNone, Selector::kAll)}) {
    const ModelSpec spec = Spec(kind);
    const Policy policy = DefaultPolicy(spec);
    EXPECT_EQ(policy.selector, selector);
    EXPECT_THAT(Validate(policy, spec), IsEmpty());
  }
}

// The policy of an attend that sets no field, as the API documents it.
TEST(Policy, Defaults) {
  const Policy policy = DefaultPolicy(Spec());
  EXPECT_EQ(policy.sink_token_count, 64);
  EXPECT_EQ(policy.window_token_count, 64);
  EXPECT_EQ(policy.dense_token_count, 2048);
  EXPECT_THAT(policy.dense_layers, IsEmpty());
  EXPECT_EQ(policy.heavy_kind, HeavyKind::kAdaptive);
  EXPECT_EQ(policy.heavy_count, 256);
  EXPECT_EQ(policy.heavy_mass, 0.95);
  EXPECT_EQ(policy.heavy_floor, 64);
  EXPECT_EQ(policy.heavy_ceiling, 4096);
  EXPECT_FALSE(policy.candidate_selector.has_value());
  EXPECT_EQ(policy.candidate_fraction, 0.25);
  EXPECT_EQ(policy.tail, Tail::kStratified);
  EXPECT_EQ(policy.bound, Bound::kRatio);
  EXPECT_EQ(policy.epsilon, 0.1);
  EXPECT_EQ(policy.delta, 0.1);
  EXPECT_EQ(policy.pilot_token_count, 24);
  EXPECT_EQ(policy.inflation, 1.25);
  EXPECT_EQ(policy.seed, 0u);
  EXPECT_EQ(policy.row_count_max, 0);
  EXPECT_EQ(Spec().hash.bits_per_dim, 3);
}

TEST(Policy, TheEdgesOfTheRangesAreInside) {
  const ModelSpec spec = Spec();
  Policy policy;
  policy.sink_token_count = 0;
  policy.window_token_count = 1;
  policy.dense_token_count = 1024;
  policy.dense_layers = {3, 0, 1, 2};
  Count(policy, 1);
  policy.delta = 0.2;
  policy.pilot_token_count = 16;
  policy.inflation = 1;
  // The open page is attended like the window.
  policy.row_count_max = 127 + 1 + 16;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
  policy.row_count_max -= 1;
  EXPECT_THAT(Validate(policy, spec), Contains(Field(&FieldError::field, "row_count_max")));
  // Without codes, there is no open page to attend to.
  policy.selector = Selector::kOracle;
  policy.row_count_max = 1 + 1 + 16;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)), IsEmpty());
  EXPECT_THAT(Validate(policy, spec), Contains(Field(&FieldError::field, "row_count_max")));

  policy = Policy();
  policy.heavy_kind = HeavyKind::kMass;
  policy.heavy_mass = 1;
  policy.heavy_floor = policy.heavy_ceiling = 1;
  policy.tail = Tail::kUniform;
  policy.bound = Bound::kDenominator;
  policy.delta = 0.5;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
}

// Sink, open page, the smallest adaptive count, and pilot.
TEST(Policy, TheFewestRowsOfTheDefault) {
  Policy policy;
  policy.row_count_max = 64 + 127 + 64 + 16;
  EXPECT_THAT(Validate(policy, Spec()), IsEmpty());
  Count(policy, 256);
  policy.row_count_max = 64 + 127 + 256 + 16;
  EXPECT_THAT(Validate(policy, Spec()), IsEmpty());
  policy.window_token_count = 300;
  policy.row_count_max = 64 + 300 + 256 + 16;
  EXPECT_THAT(Validate(policy, Spec()), IsEmpty());
}

TEST(Policy, TheHeavySetMayBeEmpty) {
  Policy policy;
  Count(policy, 0);
  EXPECT_THAT(Validate(policy, Spec()), IsEmpty());
}

TEST(Policy, AsymmetricNeedsARotation) {
  Policy policy;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)),
              Contains(Field(&FieldError::field, "selector")));
  policy.selector = Selector::kOracle;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)), IsEmpty());
}

TEST(Policy, HugeCountsDoNotOverflowTheRowMinimum) {
  Policy policy;
  Count(policy, std::numeric_limits<int64_t>::max());
  policy.sink_token_count = std::numeric_limits<int64_t>::max();
  policy.row_count_max = 1;
  EXPECT_THAT(Validate(policy, Spec()), Contains(Field(&FieldError::field, "row_count_max")));
}

TEST(Policy, DenseLayers) {
  Policy policy;
  EXPECT_FALSE(policy.IsDenseLayer(0));
  policy.dense_layers = {2, 0};
  EXPECT_TRUE(policy.IsDenseLayer(0));
  EXPECT_FALSE(policy.IsDenseLayer(1));
  EXPECT_TRUE(policy.IsDenseLayer(2));
}

// If the error of the ranks is known, it sets the heavy count; others have a fixed count.
TEST(Policy, HeavyTokens) {
  Policy policy;
  EXPECT_EQ(policy.HeavyCount(10000), 64);
  policy.selector = Selector::kOracle;
  EXPECT_EQ(policy.HeavyCount(10000), 64);
  for (const Selector selector :
       {Selector::kHamming, Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity}) {
    policy.selector = selector;
    EXPECT_FALSE(policy.KnowsRankError());
    EXPECT_EQ(policy.HeavyCount(10000), 256);
  }
  policy.selector = Selector::kAsymmetric;
  EXPECT_TRUE(policy.KnowsRankError());
  policy.candidate_selector = Selector::kOracle;
  EXPECT_FALSE(policy.KnowsRankError());
  EXPECT_EQ(policy.HeavyCount(10000), 256);
  Count(policy, 77);
  EXPECT_EQ(policy.HeavyCount(10000), 77);
  Fraction(policy, 0.0101);
  EXPECT_EQ(policy.HeavyCount(10000), 101);
}

TEST(Policy, ScoresEndBeforeTheOpenPageWhereTheyComeFromPages) {
  Policy policy;  // a window of 64
  const ModelSpec spec = Spec();
  for (const auto& [n, end] :
       {std::pair(4096, 4032), std::pair(4097, 4033), std::pair(4159, 4095), std::pair(4160, 4096),
        std::pair(4200, 4096), std::pair(4223, 4096), std::pair(4224, 4160)}) {
    for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
      policy.selector = selector;
      EXPECT_EQ(policy.ScoredEnd(spec, n), end) << n;
      EXPECT_EQ(policy.ScoredEnd(Spec(HashKind::kNone), n), n - 64) << n;
    }
    policy.window_token_count = 200;
    EXPECT_EQ(policy.ScoredEnd(spec, n), n - 200) << n;
    policy.window_token_count = 64;
  }
}

TEST(Policy, ValuesWeighWhereThePageIndexHasTheirNorms) {
  for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
    EXPECT_TRUE(WeighsValues(selector, Spec()));
    EXPECT_FALSE(WeighsValues(selector, Spec(HashKind::kNone)));
  }
  for (const Selector selector : {Selector::kHamming, Selector::kInt4Keys, Selector::kQuest,
                                  Selector::kDoubleSparsity, Selector::kAll}) {
    EXPECT_FALSE(WeighsValues(selector, Spec()));
  }
}

// If no more tokens are scored than are heavy, nothing is left for a tail.
TEST(Policy, DenseWhereNothingIsLeft) {
  Policy policy;
  policy.dense_token_count = 1024;
  const ModelSpec spec = Spec();
  EXPECT_TRUE(policy.IsDense(spec, 0, 1, 1024));
  EXPECT_FALSE(policy.IsDense(spec, 0, 1, 1025));
  EXPECT_TRUE(policy.IsDense(spec, 0, 17, 1025));
  // 1,100 tokens: eight closed pages, of which 64 tokens are the sink.
  Count(policy, 1024 - 64 - 1);
  EXPECT_FALSE(policy.IsDense(spec, 0, 1, 1100));
  Count(policy, 1024 - 64);
  EXPECT_TRUE(policy.IsDense(spec, 0, 1, 1100));
  EXPECT_FALSE(policy.IsDense(spec, 0, 1, 1024 + 128));
  policy.heavy_kind = HeavyKind::kAdaptive;
  policy.sink_token_count = 1024 - 64;
  EXPECT_TRUE(policy.IsDense(spec, 0, 1, 1100));
  policy.sink_token_count -= 1;
  EXPECT_FALSE(policy.IsDense(spec, 0, 1, 1100));
}

TEST(Policy, TermsHaveBothQuantiles) {
  Policy policy;
  const TailTerms terms = TermsOf(policy, policy, true);
  EXPECT_NEAR(terms.z, 1.6448536, 1e-6);
  EXPECT_NEAR(terms.one_sided_z, 1.2815516, 1e-6);
  EXPECT_EQ(terms.pilot_count, 24);
}

TEST(Policy, CandidatesByCountOrFraction) {
  Policy policy;
  EXPECT_EQ(policy.CandidateCount(4001), 1001);  // a quarter, rounded up
  policy.candidate_fraction = 1;
  EXPECT_EQ(policy.CandidateCount(4001), 4001);
  policy.candidate_count = 77;
  EXPECT_EQ(policy.CandidateCount(4001), 77);
}

TEST(Policy, RanksBearAPromiseAsFarAsTheyWereFoundTo) {
  constexpr int64_t k64 = 65536, k256 = 262144, kFar = int64_t{1} << 30;
  struct Case {
    Selector selector;
    int bits;
    int64_t longest;  // 0: never
  };
  for (const auto& [selector, bits, longest] :
       {Case{Selector::kAsymmetric, 1, 0}, Case{Selector::kAsymmetric, 2, k64},
        Case{Selector::kAsymmetric, 3, kFar}, Case{Selector::kAsymmetric, 4, kFar},
        Case{Selector::kInt4Keys, 1, k256}, Case{Selector::kOracle, 1, kFar},
        Case{Selector::kHamming, 4, 0}, Case{Selector::kQuest, 4, 0},
        Case{Selector::kDoubleSparsity, 4, 0}}) {
    if (FindMethod(selector) == nullptr) continue;
    ModelSpec spec = Spec(HashKind::kRotation);
    spec.hash.bits_per_dim = bits;
    Policy policy;
    policy.selector = selector;
    const auto carried = [&](int64_t n) { return RanksCarryGuarantee(policy, policy, spec, n); };
    EXPECT_EQ(carried(4096), longest > 0) << static_cast<int>(selector) << " bits " << bits;
    EXPECT_EQ(carried(longest), longest > 0);
    EXPECT_EQ(carried(longest + 1), longest == kFar);
    policy.tail = Tail::kUniform;
    EXPECT_EQ(carried(4096), longest > 0);
    // Tokens that a first selection misses have no rank.
    for (const Selector first : {Selector::kHamming, Selector::kQuest, Selector::kOracle}) {
      policy.candidate_selector = first;
      for (const Tail tail : {Tail::kUniform, Tail::kStratified}) {
        policy.tail = tail;
        EXPECT_FALSE(carried(4096)) << static_cast<int>(selector) << " bits " << bits;
      }
    }
    policy.tail = Tail::kUniform;
    policy.bound = Bound::kPaper;
    EXPECT_TRUE(carried(kFar));
    policy.candidate_selector.reset();
    EXPECT_TRUE(carried(kFar));
  }
}

}  // namespace
}  // namespace spillway
