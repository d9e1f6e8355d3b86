#include "host/methods/int4_keys/int4_range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/reference/methods.h"

namespace spillway {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Int4Range, IsThePublishedQuantiser) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  int certain = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const float scale = std::pow(10.0f, static_cast<float>(trial % 7 - 3));
    std::vector<float> x(64 + 16 * (trial % 5));
    for (float& e : x) e = scale * (normal(random) + static_cast<float>(trial % 3));
    const reference::Int4Vector wanted =
        reference::QuantiseInt4(std::vector<double>(x.begin(), x.end()));
    const auto [min, max] = std::minmax_element(x.begin(), x.end());
    const Int4Range range = Int4Range::Of(*min, *max);
    ASSERT_EQ(range.low, wanted.zero);
    if (wanted.scale_margin < 1e-6) continue;
    ASSERT_EQ(range.step, wanted.scale);
    if (wanted.border_distance < 1e-5) continue;
    ++certain;
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(range.Code(x[i]), static_cast<uint32_t>(wanted.levels[i])) << trial << " " << i;
    }
  }
  EXPECT_GT(certain, 450);
}

// The error is at most half a step, plus what rounding both ends to fp16 may cut off.
TEST(Int4Range, IsWithinHalfAStep) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> x(128);
    for (float& e : x) e = 3 * normal(random) + 1;
    const auto [min, max] = std::minmax_element(x.begin(), x.end());
    const Int4Range range = Int4Range::Of(*min, *max);
    for (const float e : x) {
      const float back = range.low + range.step * static_cast<float>(range.Code(e));
      ASSERT_NEAR(back, e, range.step / 2 + 2e-3 * (std::fabs(*min) + *max - *min));
    }
  }
}

TEST(Int4Range, PacksTheStepBelowAndTheLowAbove) {
  const Int4Range range = Int4Range::Of(-2, 13);  // step 1
  EXPECT_EQ(range.Pack(), 0xC0003C00u);
  const Int4Range back = Int4Range::Unpack(0xC0003C00u);
  EXPECT_EQ(back.low, -2);
  EXPECT_EQ(back.step, 1);
  for (uint32_t u = 0; u < 16; ++u) EXPECT_EQ(back.Code(static_cast<float>(u) - 2), u);
  // Ties go to even. Numbers beyond the ends get the codes of the ends.
  EXPECT_EQ(back.Code(-1.5f), 0u);
  EXPECT_EQ(back.Code(-0.5f), 2u);
  EXPECT_EQ(back.Code(0.5f), 2u);
  EXPECT_EQ(back.Code(-100), 0u);
  EXPECT_EQ(back.Code(100), 15u);
  EXPECT_EQ(back.Code(kInf), 15u);
  EXPECT_EQ(back.Code(-kInf), 0u);
  EXPECT_EQ(back.Code(kNan), 0u);
}

TEST(Int4Range, EqualElementsHaveNoStep) {
  for (const float x : {0.0f, -0.0f, 2.5f, -1e30f, 1e30f}) {
    const Int4Range range = Int4Range::Of(x, x);
    EXPECT_EQ(range.step, 0);
    EXPECT_EQ(range.Code(x), 0u);
    EXPECT_TRUE(std::isfinite(range.Dot(0, 7)));
  }
  EXPECT_EQ(Int4Range::Of(2.5f, 2.5f).Dot(0, 2), 5);
}

TEST(Int4Range, RangesBeyondFp16AreCut) {
  const Int4Range wide = Int4Range::Of(-3e38f, 3e38f);
  EXPECT_EQ(wide.low, -65504);
  EXPECT_EQ(wide.step, 65504);
  EXPECT_EQ(wide.Code(3e38f), 15u);
  EXPECT_EQ(wide.Code(-3e38f), 0u);
}

TEST(Int4Range, DotIsOneFusedStep) {
  const Int4Range range = Int4Range::Of(-0.7f, 1.9f);
  const float dot = 12.34567f, sum = -3.21f;
  EXPECT_EQ(range.Dot(dot, sum), std::fma(range.step, dot, range.low * sum));
}

TEST(Int4Range, EstimatesAreCut) {
  EXPECT_EQ(CutEstimate(1.5f), 1.5f);
  EXPECT_EQ(CutEstimate(-1.5f), -1.5f);
  EXPECT_EQ(CutEstimate(kInf), kEstimateMax);
  EXPECT_EQ(CutEstimate(-kInf), -kEstimateMax);
  EXPECT_EQ(CutEstimate(3e38f), kEstimateMax);
  EXPECT_EQ(CutEstimate(-3e38f), -kEstimateMax);
  EXPECT_EQ(CutEstimate(kNan), kEstimateMax);
}

}  // namespace
}  // namespace spillway
