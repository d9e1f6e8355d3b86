#include "host/core/page_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

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
  EXPECT_EQ(NormByte(false, 0, -8, 0), 127);
  EXPECT_EQ(NormByte(false, 127, -8, 0), 254);
  EXPECT_EQ(NormByte(false, 128, -8, 0), 255);
  EXPECT_EQ(NormByte(false, 1024, -8, 0), 255);
  EXPECT_EQ(NormByte(true, 0, -8, 0), 255);
  EXPECT_EQ(NormByte(true, -127, -8, 0), 255);
}

TEST(NormByte, RaisesSmallExponentsToTheFloorAndAddsTheLift) {
  EXPECT_EQ(NormByte(false, -8, -8, 0), 119);
  EXPECT_EQ(NormByte(false, -9, -8, 0), 119);
  EXPECT_EQ(NormByte(false, -127, -8, 0), 119);
  EXPECT_EQ(NormByte(false, -127, -127, 0), 0);
  EXPECT_EQ(NormByte(false, -7, -8, 20), 140);
  EXPECT_EQ(NormByte(false, -20, -8, 20), 139);
  // A lift makes no stray.
  EXPECT_EQ(NormByte(false, 100, -8, 27), 254);
  EXPECT_EQ(NormByte(false, 100, -8, 28), 254);
  EXPECT_EQ(NormByte(true, 0, -8, 20), 255);
}

// How much further the page is from the first pages than its values are from each other.
TEST(ValueLift, IsFromTheUsualValueToThePageCentre) {
  EXPECT_EQ(ValueLift(0, 0, -8), 0);
  EXPECT_EQ(ValueLift(0, 1, -8), 1);
  EXPECT_EQ(ValueLift(0, 30, -8), 30);
  EXPECT_EQ(ValueLift(-5, 30, -8), 35);
  EXPECT_EQ(ValueLift(10, -20, -8), 0);
  // The usual value is at least at the floor.
  EXPECT_EQ(ValueLift(-127, 30, -8), 38);
  EXPECT_EQ(ValueLift(-127, -127, -8), 0);
  EXPECT_EQ(ValueLift(-127, -127, -127), 0);
  EXPECT_EQ(ValueLift(0, 64, -8), 64);
  EXPECT_EQ(ValueLift(0, 65, -8), 64);
  EXPECT_EQ(ValueLift(-127, 1024, -127), 64);
}

// Pages are counted back from the last one: 1, 2, 4, 8, ... The median is of these.
TEST(UsualLevel, IsTheMedianOfTheLastPageAndOfPagesBeforeIt) {
  const auto usual = [](const std::vector<int>& levels) {
    std::vector<int64_t> seen;
    const int level = UsualLevel(static_cast<int64_t>(levels.size()), [&](int64_t page) {
      seen.push_back(page);
      return levels.at(page);
    });
    std::vector<int64_t> wanted;
    for (size_t back = 1; back <= levels.size(); back *= 2) {
      wanted.push_back(static_cast<int64_t>(levels.size() - back));
    }
    EXPECT_EQ(seen, wanted);
    return level;
  };
  EXPECT_EQ(usual({}), 0);
  EXPECT_EQ(usual({7}), 7);
  EXPECT_EQ(usual({3, 7}), 7);
  EXPECT_EQ(usual({7, 3}), 7);
  EXPECT_EQ(usual({9, 1, 0, 5, 0, 0, 2, 8}), 8);  // pages 7, 6, 4, 0: 8, 2, 0, 9
  EXPECT_EQ(usual({9, 1, 0, 5, 6, 0, 2, 3}), 6);
  // One page, or a few, do not change it.
  std::vector<int> levels(512, 16000);
  EXPECT_EQ(usual(levels), 16000);
  levels[511] = 25000;
  EXPECT_EQ(usual(levels), 16000);
  for (int page = 500; page < 512; ++page) levels[page] = 25000;
  EXPECT_EQ(usual(levels), 16000);
  for (int page = 256; page < 512; ++page) levels[page] = 25000;
  EXPECT_EQ(usual(levels), 25000);
}

TEST(RaiseOf, PutsPagesBelowTheUsualLevelThere) {
  EXPECT_EQ(RaiseOf(16256, 16256), 0);
  EXPECT_EQ(RaiseOf(16256, 16383), 0);
  EXPECT_EQ(RaiseOf(16256, 16384), 1);
  EXPECT_EQ(RaiseOf(16256, 16256 + 40 * 128), 40);
  EXPECT_EQ(RaiseOf(0, 255 * 128), 255);
  EXPECT_EQ(RaiseOf(20000, 16256), 0);
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
  EXPECT_EQ(WeighBin(2000, norm(0), 0), 2000);
  EXPECT_EQ(WeighBin(2000, norm(5), 0), 2010);
  EXPECT_EQ(WeighBin(2000, norm(127), 0), 2254);
  EXPECT_EQ(WeighBin(2000, norm(-7), 0), 1986);
  EXPECT_EQ(WeighBin(2000, norm(-100), 0), 1800);
  EXPECT_EQ(WeighBin(2000, norm(-7), 10), 2006);
  EXPECT_EQ(WeighBin(2000, norm(127), 64), 2382);
}

TEST(WeighBin, StaysAmongTheBinsOfScores) {
  EXPECT_EQ(kStrayBin, 4095);
  EXPECT_EQ(WeighBin(4090, 254, 0), 4094);
  EXPECT_EQ(WeighBin(4090, 127, 64), 4094);
  EXPECT_EQ(WeighBin(4094, 127, 0), 4094);
  EXPECT_EQ(WeighBin(4095, 127, 0), 4094);
  EXPECT_EQ(WeighBin(3, 0, 0), 1);
  EXPECT_EQ(WeighBin(1, 127 - 8, 0), 1);
}

TEST(WeighBin, SetsStraysAboveAndLeavesWhatWasNotFound) {
  EXPECT_EQ(WeighBin(1, kStrayNorm, 0), 4095);
  EXPECT_EQ(WeighBin(4094, kStrayNorm, 0), 4095);
  EXPECT_EQ(WeighBin(0, kStrayNorm, 0), 0);
  EXPECT_EQ(WeighBin(0, 200, 64), 0);
}

}  // namespace
}  // namespace spillway
