#include "host/core/value_code.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace spillway {
namespace {

TEST(ValueLevel, RoundsToQuartersOfOctaves) {
  EXPECT_EQ(ValueLevel(0.0f, 0, 0), 192);
  EXPECT_EQ(ValueLevel(0.12f, 0, 0), 192);
  EXPECT_EQ(ValueLevel(0.13f, 0, 0), 193);
  EXPECT_EQ(ValueLevel(-10.0f, 0, 0), 152);
  EXPECT_EQ(ValueLevel(15.75f, 0, 0), 255);
  EXPECT_EQ(ValueLevel(1e30f, 0, 0), 255);
  EXPECT_EQ(ValueLevel(-47.75f, 0, 0), 1);
  EXPECT_EQ(ValueLevel(-48.0f, 0, 0), 0);
  EXPECT_EQ(ValueLevel(-1e30f, 0, 0), 0);
  EXPECT_EQ(ValueLevel(-std::numeric_limits<float>::infinity(), 0, 0), 0);
  EXPECT_EQ(ValueLevel(std::numeric_limits<float>::infinity(), 0, 0), 255);
}

// A variance of s^2 nats lowers the level by s^2 / 2 nats, at most by 1.
TEST(ValueLevel, SubtractsHalfTheVariance) {
  const float shrinkage = LevelShrinkage(0.5);
  EXPECT_EQ(ValueLevel(0.0f, 1, shrinkage), 191);  // 0.25 nats: 1.44 quarters of octaves
  EXPECT_EQ(ValueLevel(0.0f, 2, shrinkage), 189);  // 0.5 nats: 2.89
  EXPECT_EQ(ValueLevel(0.0f, 4, shrinkage), 186);  // 1 nat: 5.77
  EXPECT_EQ(ValueLevel(0.0f, 1e30f, shrinkage), 186);
  EXPECT_EQ(ValueLevel(0.0f, 3e38f, LevelShrinkage(1e300)), 186);
  EXPECT_EQ(ValueLevel(0.0f, 0, LevelShrinkage(1e300)), 192);
}

TEST(LevelWeight, IsAPowerOfTwo) {
  EXPECT_EQ(LevelWeight(0), 0);
  EXPECT_EQ(LevelWeight(192), 1);
  EXPECT_EQ(LevelWeight(196), 2);
  EXPECT_EQ(LevelWeight(188), 0.5f);
  for (int level = 1; level <= 255; ++level) {
    const double wanted = std::exp2((level - 192) / 4.0);
    EXPECT_NEAR(LevelWeight(static_cast<uint8_t>(level)), wanted, 1e-7 * wanted) << level;
  }
}

TEST(LevelLogit, IsThatOfTheWeight) {
  EXPECT_NEAR(LevelLogit(192, 10), 10 * std::log(2.0), 1e-5);
  EXPECT_NEAR(LevelLogit(200, 10), 12 * std::log(2.0), 1e-5);
}

TEST(CodeWeight, IsAShareOfTheLargest) {
  const auto weight = [](float product, float largest) {
    return CodeWeight(product, CodeWeightInverse(largest));
  };
  EXPECT_EQ(weight(3.0f, 3.0f), 127);
  EXPECT_EQ(weight(1.5f, 3.0f), 64);  // 63.5, ties to even
  EXPECT_EQ(weight(0.01f, 3.0f), 0);
  EXPECT_EQ(weight(4.0f, 3.0f), 127);
  // A page without mass, and pages whose codes are too small or large to be summed.
  for (const float largest : {0.0f, 1e-37f, 2e37f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(weight(1.0f, largest), 0);
    EXPECT_EQ(weight(largest, largest), 0);
    EXPECT_EQ(CodeWeightUnit(largest), 0);
  }
  EXPECT_FLOAT_EQ(CodeWeightUnit(12.7f), 0.1f);
}

TEST(PageHasMass, ComparesWithTheMeanPage) {
  EXPECT_TRUE(PageHasMass(1.0, 10.0, 10));
  EXPECT_TRUE(PageHasMass(0.25, 10.0, 10));
  EXPECT_FALSE(PageHasMass(0.24, 10.0, 10));
  EXPECT_FALSE(PageHasMass(0, 0, 10));
}

TEST(Hadamard, TakesTheLargestPowersOfTwo) {
  EXPECT_EQ(HadamardSize(16), 16);
  EXPECT_EQ(HadamardCount(16), 1);
  EXPECT_EQ(HadamardSize(80), 64);
  EXPECT_EQ(HadamardCount(80), 2);
  EXPECT_EQ(HadamardSize(256), 256);
  EXPECT_EQ(HadamardCount(256), 1);
}

}  // namespace
}  // namespace spillway
