#include "host/core/softmax_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace spillway {
namespace {

struct State {
  SoftmaxSums sums = SoftmaxSums::Empty();
  std::vector<float> value = std::vector<float>(6, 0.0f);
  std::vector<float> value_sq = std::vector<float>(6, 0.0f);

  void Merge(const State& from) {
    const SoftmaxSums::Factors f = sums.Merge(from.sums);
    for (int i = 0; i < 6; ++i) {
      value[i] = std::fma(value[i], f.keep, from.value[i] * f.take);
      value_sq[i] = std::fma(value_sq[i], f.keep * f.keep, from.value_sq[i] * (f.take * f.take));
    }
  }
};

State RandomState(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  State s;
  s.sums = {20 * normal(random), 1 + std::fabs(normal(random)), 1, 3};
  for (float& v : s.value) v = normal(random);
  for (float& v : s.value_sq) v = normal(random);
  return s;
}

void ExpectSame(const State& a, const State& b) {
  EXPECT_EQ(a.sums.max, b.sums.max);
  EXPECT_EQ(a.sums.sum, b.sums.sum);
  EXPECT_EQ(a.sums.sum_sq, b.sums.sum_sq);
  EXPECT_EQ(a.sums.sum_sq_norm, b.sums.sum_sq_norm);
  EXPECT_EQ(a.value, b.value);
  EXPECT_EQ(a.value_sq, b.value_sq);
}

void ExpectNear(const State& a, const State& b) {
  const auto near = [](double x, double y, double scale) { EXPECT_NEAR(x, y, 2e-6 * scale); };
  EXPECT_EQ(a.sums.max, b.sums.max);
  near(a.sums.sum, b.sums.sum, b.sums.sum);
  near(a.sums.sum_sq, b.sums.sum_sq, b.sums.sum_sq);
  near(a.sums.sum_sq_norm, b.sums.sum_sq_norm, b.sums.sum_sq_norm);
  for (int i = 0; i < 6; ++i) {
    near(a.value[i], b.value[i], 5);
    near(a.value_sq[i], b.value_sq[i], 5);
  }
}

TEST(SoftmaxSums, TheEmptyStateIsNeutral) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const State s = RandomState(seed);
    State left, right = s, both;
    left.Merge(s);
    right.Merge(State());
    both.Merge(State());
    ExpectSame(left, s);
    ExpectSame(right, s);
    ExpectSame(both, State());
  }
}

TEST(SoftmaxSums, IsAssociativeAndCommutativeWithinRounding) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const State a = RandomState(3 * seed), b = RandomState(3 * seed + 1),
                c = RandomState(3 * seed + 2);
    State left = a, right = b, other = c;
    left.Merge(b);
    left.Merge(c);
    right.Merge(c);
    State whole = a;
    whole.Merge(right);
    other.Merge(a);
    other.Merge(b);
    ExpectNear(left, whole);
    ExpectNear(left, other);
  }
}

TEST(SoftmaxSums, RescalesToTheLargerMaximum) {
  State a, b;
  a.sums = {1.0f, 2.0f, 4.0f, 6.0f};
  a.value.assign(6, 8.0f);
  a.value_sq.assign(6, 10.0f);
  b.sums = {1.0f + std::log(2.0f), 1.0f, 1.0f, 1.0f};
  b.value.assign(6, 1.0f);
  b.value_sq.assign(6, 1.0f);
  a.Merge(b);
  EXPECT_FLOAT_EQ(a.sums.sum, 2);
  EXPECT_FLOAT_EQ(a.sums.sum_sq, 2);
  EXPECT_FLOAT_EQ(a.sums.sum_sq_norm, 2.5);
  EXPECT_FLOAT_EQ(a.value[3], 5);
  EXPECT_FLOAT_EQ(a.value_sq[3], 3.5);
}

TEST(SoftmaxSums, ADominatingStateSwallowsTheOther) {
  State a = RandomState(1);
  State b = RandomState(2);
  a.sums.max = -1e30f;
  b.sums.max = 1e30f;
  const State alone = b;
  a.Merge(b);
  EXPECT_EQ(a.sums.max, 1e30f);
  EXPECT_EQ(a.sums.sum, alone.sums.sum);
  EXPECT_EQ(a.value, alone.value);
}

}  // namespace
}  // namespace spillway
