#include "host/methods/lsh_sampling/lsh_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/reference/methods.h"

namespace spillway {
namespace {

TEST(LshWeight, IsThePublishedProbability) {
  for (const auto& [bits, tables] : {std::pair(8, 75), std::pair(10, 150), std::pair(1, 2),
                                     std::pair(16, 512), std::pair(4, 1)}) {
    for (double cosine = -1; cosine <= 1; cosine += 0.01) {
      // Lengths do not matter.
      const double got = LshLogWeight(6 * cosine, 3, 2, bits, tables);
      const double wanted = std::log(reference::TwoHitProbability(cosine, bits, tables) + 1e-4);
      ASSERT_NEAR(got, wanted, 1e-9) << bits << " " << tables << " " << cosine;
    }
  }
}

TEST(LshWeight, KnownValues) {
  // p = 1: buckets are shared in all tables.
  EXPECT_DOUBLE_EQ(LshLogWeight(6, 3, 2, 8, 75), std::log(1 + 1e-4));
  // p = 0: in none.
  EXPECT_DOUBLE_EQ(LshLogWeight(-6, 3, 2, 8, 75), std::log(1e-4));
  // p = 1/2 with two tables: in both with probability 1/4.
  EXPECT_NEAR(LshLogWeight(0, 3, 2, 1, 2), std::log(0.25 + 1e-4), 1e-12);
  // p = 1/4 with three tables: 3 (1/16) (3/4) + 1/64.
  EXPECT_NEAR(LshLogWeight(0, 3, 2, 2, 3), std::log(9.0 / 64 + 1.0 / 64 + 1e-4), 1e-12);
  // With one table, two buckets cannot be shared.
  EXPECT_NEAR(LshLogWeight(3, 3, 2, 4, 1), std::log(1e-4), 1e-9);
}

// Compares with random hyperplanes.
TEST(LshWeight, IsHowOftenTwoBucketsAreShared) {
  constexpr int kBits = 3, kTables = 6, kDraws = 20000;
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  for (const double cosine : {-0.5, 0.0, 0.6, 0.95}) {
    const double sine = std::sqrt(1 - cosine * cosine);
    int hits = 0;
    for (int draw = 0; draw < kDraws; ++draw) {
      int shared = 0;
      for (int t = 0; t < kTables; ++t) {
        bool same = true;
        for (int b = 0; b < kBits; ++b) {
          const double x = normal(random), y = normal(random);
          same &= (x > 0) == (cosine * x + sine * y > 0);
        }
        shared += same;
      }
      hits += shared >= kLshSharedMin;
    }
    const double wanted = std::exp(LshLogWeight(cosine, 1, 1, kBits, kTables)) - 1e-4;
    const double deviation = std::sqrt(wanted * (1 - wanted) / kDraws);
    EXPECT_NEAR(static_cast<double>(hits) / kDraws, wanted, 4.5 * deviation + 1e-4) << cosine;
  }
}

// Rounding may make a product larger than the product of the lengths.
TEST(LshWeight, TheCosineStaysInItsDomain) {
  for (const double beyond : {1 + 1e-15, 1.0001, 2.0, 1e300}) {
    EXPECT_EQ(LshLogWeight(beyond, 1, 1, 8, 75), LshLogWeight(1, 1, 1, 8, 75));
    EXPECT_EQ(LshLogWeight(-beyond, 1, 1, 8, 75), LshLogWeight(-1, 1, 1, 8, 75));
  }
  // A vector of length 0 has no angle: the weight is as at right angles.
  const double right = LshLogWeight(0, 1, 1, 8, 75);
  EXPECT_EQ(LshLogWeight(0, 0, 2, 8, 75), right);
  EXPECT_EQ(LshLogWeight(0, 2, 0, 8, 75), right);
  EXPECT_EQ(LshLogWeight(0, 0, 0, 8, 75), right);
  // Lengths whose product overflows or underflows.
  EXPECT_TRUE(std::isfinite(LshLogWeight(1e10, 1e200, 1e200, 8, 75)));
  EXPECT_TRUE(std::isfinite(LshLogWeight(0, 1e-200, 1e-200, 8, 75)));
}

TEST(LshWeight, GrowsWithTheCosine) {
  for (const auto& [bits, tables] : {std::pair(1, 2), std::pair(8, 75), std::pair(16, 512)}) {
    // Up to the rounding error of the subtraction from 1.
    double last = -std::numeric_limits<double>::infinity();
    for (int i = -1000; i <= 1000; ++i) {
      const double weight = LshLogWeight(i / 1000.0, 1, 1, bits, tables);
      ASSERT_GE(weight, last - 1e-8) << bits << " " << i;
      ASSERT_GE(weight, std::log(1e-4) - 1e-8);
      ASSERT_LE(weight, std::log(1 + 1e-4) + 1e-12);
      last = weight;
    }
  }
}

}  // namespace
}  // namespace spillway
