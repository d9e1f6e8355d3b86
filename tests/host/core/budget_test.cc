#include "host/core/budget.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace spillway {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// n_s = 1000, sigma = 2, T_N = 9, T_o = 4, ||N|| = 3000, D = 500.
const UniformTail kTail{1000, 2, 9, 4, 3000, 500};

TEST(UniformBudget, Denominator) {
  // z = 1.64485; (1.64485 * 1000 * 2 / (.1 * 500))^2 = 65.794^2.
  EXPECT_NEAR(
      UniformBudget(Bound::kDenominator, kTail, 0.1, BoundQuantile(Bound::kDenominator, 0.1)),
      4328.87, 0.01);
}

TEST(UniformBudget, Paper) {
  // z' = Phi^-1(.975) = 1.95996; A = 1.95996 * 1000 * 3 / 3000 = 1.95996,
  // B = 1.95996 * 1000 * 2 / 500 = 7.83986; (2 * 9.79982 / .1)^2.
  EXPECT_NEAR(UniformBudget(Bound::kPaper, kTail, 0.1, BoundQuantile(Bound::kPaper, 0.1)), 38414.6,
              0.1);
}

TEST(UniformBudget, Ratio) {
  // (1.64485 * 1000 * 2 / (.1 * 3000))^2 = 10.9657^2.
  EXPECT_NEAR(UniformBudget(Bound::kRatio, kTail, 0.1, BoundQuantile(Bound::kRatio, 0.1)), 120.246,
              0.001);
}

TEST(UniformBudget, IsNothingWithoutVarianceAndInfiniteWithoutNorm) {
  for (const Bound bound : {Bound::kDenominator, Bound::kPaper, Bound::kRatio}) {
    EXPECT_EQ(UniformBudget(bound, {1000, 0, 0, 0, 0, 0}, 0.1, BoundQuantile(bound, 0.1)), 0);
    EXPECT_EQ(UniformBudget(bound, {1000, 2, 9, 4, 0, 0}, 0.1, BoundQuantile(bound, 0.1)), kInf);
  }
}

TEST(FinitePopulation, CorrectsRoundsUpAndClamps) {
  EXPECT_EQ(FinitePopulation(100, 100, 10), 50);
  EXPECT_EQ(FinitePopulation(120.246, 1000, 48), 108);  // 107.34
  EXPECT_EQ(FinitePopulation(4328.87, 1000, 48), 813);  // 812.34
  EXPECT_EQ(FinitePopulation(3, 1000, 48), 48);
  EXPECT_EQ(FinitePopulation(0, 1000, 48), 48);
  EXPECT_EQ(FinitePopulation(3, 20, 48), 20);
  EXPECT_EQ(FinitePopulation(kInf, 1000, 48), 1000);
  EXPECT_EQ(FinitePopulation(1e30, 1000, 48), 1000);
}

}  // namespace
}  // namespace spillway
