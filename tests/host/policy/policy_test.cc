#include "host/policy/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::IsEmpty;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

ModelSpec Spec(HashKind kind = HashKind::kRotation) {
  ModelSpec spec;
  spec.layer_count = 4;
  spec.query_head_count = 8;
  spec.kv_head_count = 2;
  spec.head_dim = 64;
  spec.hash.kind = kind;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  return spec;
}

struct BadCase {
  const char* field;
  void (*change)(Policy&);
};

class BadPolicy : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadPolicy, NamesTheField) {
  const ModelSpec spec = Spec();
  Policy policy = DefaultPolicy(spec);
  GetParam().change(policy);
  EXPECT_THAT(Validate(policy, spec), Contains(Field(&FieldError::field, GetParam().field)));
}

void Mass(Policy& p) { p.heavy_kind = HeavyKind::kMass; }
void Candidates(Policy& p) { p.candidate_selector = Selector::kHamming; }
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
        BadCase{"top_k.count", [](Policy& p) { p.heavy_count = -1; }},
        BadCase{"top_k.count", [](Policy& p) { p.heavy_count = int64_t{1} << 31; }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 0); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 1.5); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, kNan); }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 0; }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 1.01; }},
        BadCase{"top_p.floor_token_count", [](Policy& p) { Mass(p), p.heavy_floor = 0; }},
        BadCase{"top_p.ceiling_token_count", [](Policy& p) { Mass(p), p.heavy_ceiling = 63; }},
        BadCase{"top_p", [](Policy& p) { Mass(p), p.selector = Selector::kHamming; }},
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
        BadCase{"row_count_max", [](Policy& p) { p.row_count_max = 399; }},
        BadCase{"row_count_max", [](Policy& p) { p.row_count_max = -1; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kSketch; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kQuest; }},
        BadCase{"selector", [](Policy& p) { p.selector = Selector::kDoubleSparsity; }},
        BadCase{"candidates.selector", [](Policy& p) { p.candidate_selector = Selector::kAll; }},
        BadCase{"candidates.selector", [](Policy& p) { p.candidate_selector = Selector::kSketch; }},
        BadCase{"candidates.selector", [](Policy& p) { p.candidate_selector = Selector::kQuest; }},
        BadCase{"candidates.selector",
                [](Policy& p) { p.candidate_selector = Selector::kDoubleSparsity; }},
        BadCase{"candidates.selector",
                [](Policy& p) { p.candidate_selector = static_cast<Selector>(17); }},
        BadCase{"candidates",
                [](Policy& p) {
                  p.candidate_selector = Selector::kAsymmetric, p.selector = Selector::kHamming;
                }},
        BadCase{"candidates.count", [](Policy& p) { Candidates(p), p.candidate_count = -1; }},
        BadCase{"candidates.count",
                [](Policy& p) { Candidates(p), p.candidate_count = int64_t{1} << 31; }},
        BadCase{"candidates.fraction", [](Policy& p) { Candidates(p), p.candidate_fraction = 0; }},
        BadCase{"candidates.fraction",
                [](Policy& p) { Candidates(p), p.candidate_fraction = 1.01; }},
        BadCase{"candidates.fraction",
                [](Policy& p) { Candidates(p), p.candidate_fraction = kNan; }},
        BadCase{"tail", [](Policy& p) { p.tail = Tail::kLshSampling; }},
        BadCase{"row_count_max",
                [](Policy& p) { p.tail = Tail::kLshSampling, p.row_count_max = 1 << 20; }}));

TEST(Policy, DefaultsFitEveryKindOfModel) {
  for (const auto& [kind, selector] : {std::pair(HashKind::kRotation, Selector::kAsymmetric),
                                       std::pair(HashKind::kMlp, Selector::kHamming),
                                       std::pair(HashKind::kNone, Selector::kAll)}) {
    const ModelSpec spec = Spec(kind);
    const Policy policy = DefaultPolicy(spec);
    EXPECT_EQ(policy.selector, selector);
    EXPECT_THAT(Validate(policy, spec), IsEmpty());
  }
}

// What an attend does that asks for nothing, as the API documents it.
TEST(Policy, Defaults) {
  const Policy policy = DefaultPolicy(Spec());
  EXPECT_EQ(policy.sink_token_count, 64);
  EXPECT_EQ(policy.window_token_count, 64);
  EXPECT_EQ(policy.dense_token_count, 2048);
  EXPECT_THAT(policy.dense_layers, IsEmpty());
  EXPECT_EQ(policy.heavy_kind, HeavyKind::kCount);
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
  EXPECT_EQ(policy.pilot_token_count, 48);
  EXPECT_EQ(policy.inflation, 1.25);
  EXPECT_EQ(policy.seed, 0u);
  EXPECT_EQ(policy.row_count_max, 0);
  EXPECT_EQ(Spec().hash.bits_per_dim, 3);
}

TEST(Policy, SelectorsNeedTheirCodes) {
  Policy policy;
  policy.selector = Selector::kAsymmetric;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kMlp)),
              Contains(Field(&FieldError::field, "selector")));
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)),
              Contains(Field(&FieldError::field, "selector")));
  policy.selector = Selector::kHamming;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kRotation)), IsEmpty());
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)),
              Contains(Field(&FieldError::field, "selector")));
  policy.selector = Selector::kOracle;
  EXPECT_THAT(Validate(policy, Spec(HashKind::kNone)), IsEmpty());
}

TEST(Policy, TheEdgesOfTheRangesAreInside) {
  const ModelSpec spec = Spec();
  Policy policy;
  policy.sink_token_count = 0;
  policy.window_token_count = 1;
  policy.dense_token_count = 1024;
  policy.dense_layers = {3, 0, 1, 2};
  policy.heavy_count = 1;
  policy.delta = 0.2;
  policy.pilot_token_count = 16;
  policy.inflation = 1;
  policy.row_count_max = 18;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
  policy.row_count_max = 17;
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

TEST(Policy, HugeCountsDoNotOverflowTheRowMinimum) {
  Policy policy;
  policy.heavy_count = std::numeric_limits<int64_t>::max();
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

ModelSpec IndexedSpec() {
  ModelSpec spec = Spec(HashKind::kNone);
  spec.indices = {true, 16, 16, 75, 8, 0};
  EXPECT_THAT(Normalize(spec), IsEmpty());
  return spec;
}

TEST(Policy, SelectorsAndTailsNeedTheirIndices) {
  const ModelSpec indexed = IndexedSpec();
  const std::pair<Selector, const char*> needs[] = {
      {Selector::kSketch, "SELECTOR_SKETCH needs a model with key_indices.sketch"},
      {Selector::kQuest, "SELECTOR_QUEST needs a model with key_indices.quest_page_token_count"},
      {Selector::kDoubleSparsity,
       "SELECTOR_DOUBLE_SPARSITY needs a model with key_indices.label_channel_count"}};
  for (const auto& [selector, message] : needs) {
    Policy policy;
    policy.selector = selector;
    EXPECT_THAT(Validate(policy, indexed), IsEmpty());
    EXPECT_THAT(Validate(policy, Spec()), Contains(Field(&FieldError::description, message)));
    policy.selector = Selector::kOracle;
    policy.candidate_selector = selector;
    EXPECT_THAT(Validate(policy, indexed), IsEmpty());
    EXPECT_THAT(Validate(policy, Spec()), Contains(Field(&FieldError::description, message)));
  }
  Policy policy;
  policy.selector = Selector::kQuest;
  policy.tail = Tail::kLshSampling;
  EXPECT_THAT(Validate(policy, indexed), IsEmpty());
  EXPECT_THAT(Validate(policy, Spec()),
              Contains(Field(&FieldError::description,
                             "TAIL_LSH_SAMPLING needs a model with key_indices.lsh_table_count")));
}

TEST(Policy, SaysTheValueAndTheLimitOfWhatIsNew) {
  const auto description = [](void (*change)(Policy&)) {
    Policy policy;
    change(policy);
    const std::vector<FieldError> errors = Validate(policy, Spec());
    EXPECT_EQ(errors.size(), 1u);
    return errors.empty() ? "" : errors[0].description;
  };
  EXPECT_EQ(description([](Policy& p) { Candidates(p), p.candidate_count = int64_t{1} << 31; }),
            "value 2147483648 is not in [0, 2147483647]");
  EXPECT_EQ(description([](Policy& p) { Candidates(p), p.candidate_fraction = 2; }),
            "value 2 is not in (0, 1]");
}

TEST(Policy, DefaultsTakeTheBestEstimateThatThereIs) {
  ModelSpec spec = IndexedSpec();
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kSketch);
  spec.indices.sketch = false;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kDoubleSparsity);
  spec.indices.label_channel_count = 0;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kQuest);
  spec.indices.quest_page_token_count = 0;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kAll);
  EXPECT_THAT(Validate(DefaultPolicy(spec), spec), IsEmpty());
}

TEST(Policy, TheEdgesOfWhatIsNewAreInside) {
  const ModelSpec spec = Spec();
  Policy policy;
  policy.heavy_count = 0;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
  Candidates(policy);
  policy.candidate_fraction = 1;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
  policy.candidate_count = std::numeric_limits<int32_t>::max();
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
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
        Case{Selector::kAsymmetric, 3, k256}, Case{Selector::kAsymmetric, 4, k256},
        Case{Selector::kSketch, 1, k256}, Case{Selector::kOracle, 1, kFar},
        Case{Selector::kHamming, 4, 0}, Case{Selector::kQuest, 4, 0},
        Case{Selector::kDoubleSparsity, 4, 0}}) {
    ModelSpec spec = Spec(HashKind::kRotation);
    spec.hash.bits_per_dim = bits;
    Policy policy;
    policy.selector = selector;
    const auto bears = [&](int64_t n) { return RanksCarryGuarantee(policy, policy, spec, n); };
    EXPECT_EQ(bears(4096), longest > 0) << static_cast<int>(selector) << " bits " << bits;
    EXPECT_EQ(bears(longest), longest > 0);
    EXPECT_FALSE(selector != Selector::kOracle && bears(longest + 1));
    policy.tail = Tail::kUniform;
    EXPECT_EQ(bears(4096), longest > 0);
    // What a first selection misses has no rank.
    for (const Selector first : {Selector::kHamming, Selector::kQuest, Selector::kOracle}) {
      policy.candidate_selector = first;
      for (const Tail tail : {Tail::kUniform, Tail::kStratified}) {
        policy.tail = tail;
        EXPECT_FALSE(bears(4096)) << static_cast<int>(selector) << " bits " << bits;
      }
    }
    policy.tail = Tail::kUniform;
    policy.bound = Bound::kPaper;
    EXPECT_TRUE(bears(kFar));
    policy.candidate_selector.reset();
    EXPECT_TRUE(bears(kFar));
  }
}

}  // namespace
}  // namespace spillway
