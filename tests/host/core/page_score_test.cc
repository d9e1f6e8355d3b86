#include "host/core/page_score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace spillway {
namespace {

TEST(CentreLogit, IsInUnitsOfTheExponent) {
  constexpr double kLog2E = 1.4426950408889634;
  EXPECT_FLOAT_EQ(CentreLogit(3.0f, 0.125f), static_cast<float>(3 * 0.125 * kLog2E));
  EXPECT_EQ(CentreLogit(0.0f, 0.125f), 0);
  EXPECT_FLOAT_EQ(CentreLogit(-1e30f, 0.25f), static_cast<float>(-1e30 * 0.25 * kLog2E));
}

TEST(CentreLogit, IsCutToANumber) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(CentreLogit(3e38f, 1.0f), 1e37f);
  EXPECT_EQ(CentreLogit(kInf, 0.125f), 1e37f);
  EXPECT_EQ(CentreLogit(-kInf, 0.125f), -1e37f);
  EXPECT_EQ(CentreLogit(std::numeric_limits<float>::quiet_NaN(), 0.125f), 0);
}

// The product with the factor is not rounded before the page's part is added.
TEST(EstimatedLogit, RoundsOnce) {
  const float scaled = 1 + std::ldexp(1.0f, -12), factor = 1 - std::ldexp(1.0f, -12);
  EXPECT_EQ(EstimatedLogit(scaled, factor, -1.0f), -std::ldexp(1.0f, -24));
  EXPECT_EQ(EstimatedLogit(3, 2, 0.5f), 6.5f);
  EXPECT_EQ(EstimatedLogit(3, 0, 0.5f), 0.5f);
}

}  // namespace
}  // namespace spillway
