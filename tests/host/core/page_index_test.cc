#include "host/core/page_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace spillway {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSubnormal = 1e-40f;

TEST(ClosedPages, AreThoseWithAllTheirRows) {
  for (const auto& [tokens, pages] : {std::pair(0, 0), std::pair(127, 0), std::pair(128, 1),
                                      std::pair(255, 1), std::pair(1023, 7), std::pair(1024, 8)}) {
    EXPECT_EQ(ClosedPages(tokens), pages) << tokens;
  }
}

TEST(RadiusOf, IsTheLargestElementTimesTheRootOfTheRest) {
  EXPECT_EQ(RadiusOf(0, 0), 0);
  EXPECT_EQ(RadiusOf(8, 1), 8);
  EXPECT_EQ(RadiusOf(3, 4), 6);
  EXPECT_EQ(RadiusOf(1e-38f, 1.0f), 1e-38f);  // its square underflows
  EXPECT_EQ(RadiusOf(3e38f, 4), kInf);
}

TEST(IsStray, LiesFourTimesFurtherThanIsUsualInItsPageAndAtFirst) {
  EXPECT_FALSE(IsStray(4, 1, 1));
  EXPECT_TRUE(IsStray(std::nextafter(4.0f, 5.0f), 1, 1));
  // The larger of the two medians counts as usual.
  EXPECT_FALSE(IsStray(12, 3, 1));
  EXPECT_FALSE(IsStray(12, 1, 3));
  EXPECT_TRUE(IsStray(12.1f, 1, 3));
  EXPECT_TRUE(IsStray(12.1f, 3, 1));
  // Keys that are all equal have radii of 0.
  EXPECT_FALSE(IsStray(0, 0, 0));
  EXPECT_TRUE(IsStray(kSubnormal, 0, 0));
  EXPECT_TRUE(IsStray(kInf, 1, 1));
}

TEST(PowerOfTwoBelow, IsTheLargestNotAboveX) {
  for (int exponent = -126; exponent <= 125; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    EXPECT_EQ(PowerOfTwoBelow(power), power);
    EXPECT_EQ(PowerOfTwoBelow(1.37f * power), power);
    EXPECT_EQ(PowerOfTwoBelow(std::nextafter(2 * power, 0.0f)), power);
    EXPECT_TRUE(std::isnormal(1 / power)) << exponent;
  }
}

// Outside the range: the nearest power that has an inverse.
TEST(PowerOfTwoBelow, StaysWhereItsInverseIsANumber) {
  for (const float x : {kSubnormal, std::numeric_limits<float>::min() / 2}) {
    EXPECT_EQ(PowerOfTwoBelow(x), std::ldexp(1.0f, -126));
  }
  for (const float x : {std::ldexp(1.0f, 126), 3e38f, kInf}) {
    EXPECT_EQ(PowerOfTwoBelow(x), std::ldexp(1.0f, 125));
  }
}

// round(8 log2(distance / reference)): thresholds lie at 2^((j + 1/2) / 8).
TEST(ValueExponent, RoundsEighthsOfAnOctave) {
  for (int octave = -15; octave <= 15; ++octave) {
    for (int j = 0; j < 8; ++j) {
      const auto threshold = static_cast<float>(std::exp2(octave + (j + 0.5) / 8));
      float below = threshold, above = threshold;
      for (int ulp = 0; ulp < 2; ++ulp) {
        below = std::nextafter(below, 0.0f);
        above = std::nextafter(above, kInf);
      }
      EXPECT_EQ(ValueExponent(below, 1), 8 * octave + j) << octave << " " << j;
      EXPECT_EQ(ValueExponent(threshold, 1), 8 * octave + j + 1) << octave << " " << j;
      EXPECT_EQ(ValueExponent(above, 1), 8 * octave + j + 1) << octave << " " << j;
      // The middle between two thresholds.
      const auto middle = static_cast<float>(std::exp2(octave + j / 8.0));
      EXPECT_EQ(ValueExponent(middle, 1), 8 * octave + j);
    }
  }
}

TEST(ValueExponent, IsOfTheRatio) {
  EXPECT_EQ(ValueExponent(3e-30f, 3e-30f), 0);
  EXPECT_EQ(ValueExponent(6e30f, 3e30f), 8);
  EXPECT_EQ(ValueExponent(3e-30f, 12e-30f), -16);
}

TEST(ValueExponent, EndsBelowAndGoesOnAbove) {
  EXPECT_EQ(ValueExponent(0, 1), -127);
  EXPECT_EQ(ValueExponent(0, kSubnormal), -127);
  EXPECT_EQ(ValueExponent(kSubnormal, 1), -127);  // the ratio is subnormal
  EXPECT_EQ(ValueExponent(1e-30f, 1e30f), -127);  // the ratio is 0
  EXPECT_EQ(ValueExponent(kSubnormal, kSubnormal), 0);
  EXPECT_EQ(ValueExponent(std::ldexp(1.0f, -126), 1), -127);
  EXPECT_EQ(ValueExponent(std::exp2(-127.0f / 8), 1), -127);
  EXPECT_EQ(ValueExponent(std::exp2(-126.0f / 8), 1), -126);
  EXPECT_EQ(ValueExponent(std::exp2(127.0f / 8), 1), 127);
  EXPECT_EQ(ValueExponent(65536, 1), 128);
  EXPECT_GT(ValueExponent(1e30f, 1e-8f), 127);
  EXPECT_GT(ValueExponent(kInf, 1), 127);
  EXPECT_GT(ValueExponent(1e30f, 1e-30f), 127);
  EXPECT_EQ(ValueExponent(kInf, kInf), -127);
}

TEST(NormByte, TellsStraysOfKeysAndOfValues) {
  EXPECT_EQ(NormByte(false, -127), 0);
  EXPECT_EQ(NormByte(false, 0), 127);
  EXPECT_EQ(NormByte(false, 127), 254);
  EXPECT_EQ(NormByte(false, 128), 255);
  EXPECT_EQ(NormByte(false, 1024), 255);
  EXPECT_EQ(NormByte(true, 0), 255);
  EXPECT_EQ(NormByte(true, -127), 255);
}

TEST(ValueFloor, IsHalfOfTheReferenceOrTheRootMeanSquare) {
  EXPECT_EQ(ValueFloor(1), -8);
  EXPECT_EQ(ValueFloor(1e6), -8);
  EXPECT_EQ(ValueFloor(0.25), -8);
  EXPECT_EQ(ValueFloor(0.3 * 0.3), -14);  // 8 log2 .3 = -13.9
  EXPECT_EQ(ValueFloor(1.0 / 16), -16);
  EXPECT_EQ(ValueFloor(1.0 / 64), -24);
  EXPECT_EQ(ValueFloor(0), -127);
  EXPECT_EQ(ValueFloor(std::numeric_limits<double>::infinity()), -8);
  EXPECT_EQ(ValueFloor(kNan), -127);
}

TEST(ValuesCanBeSampled, DownToAQuarterOfTheReference) {
  EXPECT_TRUE(ValuesCanBeSampled(-8));
  EXPECT_TRUE(ValuesCanBeSampled(-16));
  EXPECT_FALSE(ValuesCanBeSampled(-17));
  EXPECT_FALSE(ValuesCanBeSampled(-127));
}

TEST(WeighBin, AddsTwoBinsAnEighth) {
  const auto norm = [](int exponent) { return static_cast<uint8_t>(exponent + 127); };
  EXPECT_EQ(WeighBin(2000, norm(0), -8), 2000);
  EXPECT_EQ(WeighBin(2000, norm(5), -8), 2010);
  EXPECT_EQ(WeighBin(2000, norm(127), -8), 2254);
  EXPECT_EQ(WeighBin(2000, norm(-7), -8), 1986);
  // Norms below the floor count as the floor.
  EXPECT_EQ(WeighBin(2000, norm(-8), -8), 1984);
  EXPECT_EQ(WeighBin(2000, norm(-100), -8), 1984);
  EXPECT_EQ(WeighBin(2000, norm(-100), -30), 1940);
}

TEST(WeighBin, StaysAmongTheBinsOfScores) {
  EXPECT_EQ(kStrayBin, 4095);
  EXPECT_EQ(WeighBin(4090, 254, -8), 4094);
  EXPECT_EQ(WeighBin(4094, 127, -8), 4094);
  EXPECT_EQ(WeighBin(4095, 127, -8), 4094);
  EXPECT_EQ(WeighBin(3, 0, -127), 1);
  EXPECT_EQ(WeighBin(1, 127 - 8, -8), 1);
}

TEST(WeighBin, SetsStraysAboveAndLeavesWhatWasNotFound) {
  EXPECT_EQ(WeighBin(1, kStrayNorm, -8), 4095);
  EXPECT_EQ(WeighBin(4094, kStrayNorm, -8), 4095);
  EXPECT_EQ(WeighBin(0, kStrayNorm, -8), 0);
  EXPECT_EQ(WeighBin(0, 200, -8), 0);
}

}  // namespace
}  // namespace spillway
