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
        BadCase{"top_k.count", [](Policy& p) { p.heavy_count = 0; }},
        BadCase{"top_k.count", [](Policy& p) { p.heavy_count = int64_t{1} << 31; }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 0); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, 1.5); }},
        BadCase{"top_k.fraction", [](Policy& p) { Fraction(p, kNan); }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 0; }},
        BadCase{"top_p.mass", [](Policy& p) { Mass(p), p.heavy_mass = 1.01; }},
        BadCase{"top_p.floor_token_count", [](Policy& p) { Mass(p), p.heavy_floor = 0; }},
        BadCase{"top_p.ceiling_token_count", [](Policy& p) { Mass(p), p.heavy_ceiling = 63; }},
        BadCase{"top_p", [](Policy& p) { Mass(p), p.selector = Selector::kHamming; }},
        BadCase{"tail", [](Policy& p) { p.tail = static_cast<Tail>(3); }},
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
        BadCase{"row_count_max", [](Policy& p) { p.row_count_max = -1; }}));

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

}  // namespace
}  // namespace spillway
