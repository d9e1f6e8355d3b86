// What policies may ask of optional methods.
#include "host/policy/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/host/policy/policy_cases.h"

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::IsEmpty;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class BadMethodsPolicy : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadMethodsPolicy, NamesTheField) { ExpectRefused(GetParam()); }

void Candidates(Policy& p) { p.candidate_selector = Selector::kHamming; }

INSTANTIATE_TEST_SUITE_P(
    Policy, BadMethodsPolicy,
    ::testing::Values(
        BadCase{"top_p", [](Policy& p) { Mass(p), p.selector = Selector::kHamming; }},
        BadCase{"candidates.selector", [](Policy& p) { p.candidate_selector = Selector::kAll; }},
        BadCase{"candidates.selector",
                [](Policy& p) { p.candidate_selector = Selector::kInt4Keys; }},
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
        BadCase{"row_count_max",
                [](Policy& p) { p.tail = Tail::kLshSampling, p.row_count_max = 1 << 20; }}));

TEST(MethodsPolicy, TheDefaultOfMlpsIsHamming) {
  const ModelSpec spec = Spec(HashKind::kMlp);
  const Policy policy = DefaultPolicy(spec);
  EXPECT_EQ(policy.selector, Selector::kHamming);
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
}

// Matching bits come from the codes of closed pages, also in a first selection. The other indices
// cover all tokens.
TEST(MethodsPolicy, ScoresEndBeforeTheOpenPageWhereTheyComeFromPages) {
  Policy policy;
  const ModelSpec spec = Spec();
  policy.selector = Selector::kHamming;
  EXPECT_EQ(policy.ScoredEnd(spec, 4200), 4096);
  EXPECT_EQ(policy.ScoredEnd(Spec(HashKind::kMlp), 4200), 4136);
  for (const Selector selector :
       {Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity}) {
    policy.selector = selector;
    policy.candidate_selector.reset();
    EXPECT_EQ(policy.ScoredEnd(spec, 4200), 4136);
    policy.candidate_selector = Selector::kHamming;
    EXPECT_EQ(policy.ScoredEnd(spec, 4200), 4096);
    policy.candidate_selector = Selector::kQuest;
    EXPECT_EQ(policy.ScoredEnd(spec, 4200), 4136);
  }
}

TEST(MethodsPolicy, SelectorsNeedTheirCodes) {
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

ModelSpec IndexedSpec() {
  ModelSpec spec = Spec(HashKind::kNone);
  spec.indices = {true, 16, 16, 75, 8, 0};
  EXPECT_THAT(Normalize(spec), IsEmpty());
  return spec;
}

TEST(MethodsPolicy, SelectorsAndTailsNeedTheirIndices) {
  const ModelSpec indexed = IndexedSpec();
  const std::pair<Selector, const char*> needs[] = {
      {Selector::kInt4Keys, "SELECTOR_INT4_KEYS needs a model with key_indices.int4_keys"},
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

TEST(MethodsPolicy, SaysTheValueAndTheLimitOfCandidates) {
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

TEST(MethodsPolicy, DefaultsTakeTheBestEstimateThatThereIs) {
  ModelSpec spec = IndexedSpec();
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kInt4Keys);
  spec.indices.int4_keys = false;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kDoubleSparsity);
  spec.indices.label_channel_count = 0;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kQuest);
  spec.indices.quest_page_token_count = 0;
  EXPECT_EQ(DefaultPolicy(spec).selector, Selector::kAll);
  EXPECT_THAT(Validate(DefaultPolicy(spec), spec), IsEmpty());
}

TEST(MethodsPolicy, TheEdgesOfCandidatesAreInside) {
  const ModelSpec spec = Spec();
  Policy policy;
  Candidates(policy);
  policy.candidate_fraction = 1;
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
  policy.candidate_count = std::numeric_limits<int32_t>::max();
  EXPECT_THAT(Validate(policy, spec), IsEmpty());
}

}  // namespace
}  // namespace spillway
