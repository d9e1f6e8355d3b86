#include "host/core/rank_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/reference/codes.h"

namespace spillway {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double Density(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0)); }

// The mean square error of Max's uniform quantiser for normal numbers.
TEST(QuantiserDistortion, IsOfTheStepsThatCodesHave) {
  for (int bits = 1; bits <= 4; ++bits) {
    const double step = reference::QuantiserStep(bits);
    const int half = 1 << (bits - 1);
    double sum = 0;
    constexpr double kWidth = 1e-4;
    for (double x = kWidth / 2; x < 10; x += kWidth) {
      const double level = std::min(std::floor(x / step), half - 1.0) + 0.5;
      sum += 2 * kWidth * (x - level * step) * (x - level * step) * Density(x);
    }
    EXPECT_NEAR(QuantiserDistortion(bits), sum, 2e-3 * sum) << bits;
  }
}

constexpr int kD = 64;

// The mean of (estimate - logit)^2 / sigma^2 over random rotations. along: the multiple of the
// query that is part of each key's difference from its centre.
double ErrorRatio(int bits, double along) {
  constexpr int kRotations = 100, kKeys = 60;
  constexpr double kScale = 0.3;
  std::mt19937_64 random(bits);
  std::normal_distribution<double> normal;
  double ratio = 0;
  for (int r = 0; r < kRotations; ++r) {
    const std::vector<float> rotation = MakeRotation(kD, 1000 * bits + r, 0);
    // About unit length, with a few large elements.
    std::vector<double> q(kD);
    for (int i = 0; i < kD; ++i) q[i] = normal(random) * (i % 16 == 0 ? 0.44 : 0.06);
    const reference::QuantisedQuery query = reference::QuantiseQuery(q, rotation);
    const double scale =
        RankErrorScale(kScale, QuantiserDistortion(bits), query.norm_sq, query.error_sq);
    for (int k = 0; k < kKeys; ++k) {
      std::vector<double> key(kD), centre(kD);
      for (int i = 0; i < kD; ++i) {
        centre[i] = 3 * normal(random);
        key[i] = centre[i] + along * q[i] + normal(random) / std::sqrt(kD);
      }
      const reference::RotationCode code = reference::EncodeRotated(key, centre, rotation, bits);
      const double estimate = reference::AsymmetricLogit(code, query, bits, kScale) +
                              kScale * reference::Dot(q, centre);
      const double error = estimate - kScale * reference::Dot(q, key);
      ratio += error * error / (scale * code.factor * code.factor) / (kRotations * kKeys);
    }
  }
  return ratio;
}

TEST(RankErrorScale, IsTheMeanSquareOfEstimatesErrors) {
  // The standard error is 2 %, with 6,000 squares of nearly normal numbers.
  for (int bits = 1; bits <= 4; ++bits) EXPECT_NEAR(ErrorRatio(bits, 0), 1, 0.07) << bits;
}

// Estimates are better for keys that point towards the query.
TEST(RankErrorScale, IsAtLeastThatOfKeysAlongTheQuery) {
  for (int bits = 1; bits <= 4; ++bits) {
    const double ratio = ErrorRatio(bits, 0.8);
    EXPECT_LT(ratio, 1) << bits;
    EXPECT_GT(ratio, 0.4) << bits;
  }
}

TEST(RankErrorScale, IsNothingWithoutAQuery) { EXPECT_EQ(RankErrorScale(1, 0.1, 0, 0), 0); }

TEST(SumChains, AddsPairsThatLieHalfApart) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  for (const int count : {kRankChains, kRankPageChains}) {
    std::vector<float> chains(count);
    for (float& c : chains) c = normal(random);
    std::vector<float> wanted = chains;
    while (wanted.size() > 1) {
      std::vector<float> half(wanted.size() / 2);
      for (size_t j = 0; j < half.size(); ++j) half[j] = wanted[j] + wanted[j + half.size()];
      wanted = half;
    }
    EXPECT_EQ(SumChains(chains.data(), count), wanted[0]) << count;
  }
}

TEST(RankVariance, IsTheMeanByWeight) {
  EXPECT_DOUBLE_EQ(RankVariance(2, {4, 6}), 3);
  EXPECT_EQ(RankVariance(2, {0, 0}), 0);
  EXPECT_EQ(RankVariance(2, {1, kInf}), kInf);
  EXPECT_TRUE(std::isnan(RankVariance(0, {1, kInf})));
}

TEST(AdaptiveHeavyCount, DoublesAtOneOneAndAHalfTwoAndAHalfAndFour) {
  const auto above = [](double x) { return std::nextafter(x, kInf); };
  for (const auto& [variance, count] :
       {std::pair(0.0, 64), std::pair(1.0, 64), std::pair(above(1.0), 128), std::pair(2.25, 128),
        std::pair(above(2.25), 256), std::pair(6.25, 256), std::pair(above(6.25), 512),
        std::pair(16.0, 512), std::pair(above(16.0), 1024), std::pair(1e30, 1024),
        std::pair(kInf, 1024), std::pair(kNan, 1024)}) {
    EXPECT_EQ(AdaptiveHeavyCount(variance), count) << variance;
  }
}

TEST(RanksHold, UpToASigmaOfSix) {
  EXPECT_TRUE(RanksHold(0));
  EXPECT_TRUE(RanksHold(36));
  EXPECT_FALSE(RanksHold(std::nextafter(36.0, kInf)));
  EXPECT_FALSE(RanksHold(kInf));
  EXPECT_FALSE(RanksHold(kNan));
}

}  // namespace
}  // namespace spillway
