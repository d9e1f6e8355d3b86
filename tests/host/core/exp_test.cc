#include "host/core/exp.h"

#include <gtest/gtest.h>

#include <cmath>

namespace spillway {
namespace {

TEST(ExpF32, IsWithinItsErrorBound) {
  double worst = 0;
  float at = 0;
  for (double x = kExpMin; x <= 88; x += 1.0 / 4099) {
    const float rounded = static_cast<float>(x);
    const double exact = std::exp(double{rounded});
    const double error = std::fabs(ExpF32(rounded) - exact) / exact;
    if (error > worst) {
      worst = error;
      at = rounded;
    }
  }
  EXPECT_LT(worst, 2e-7) << "at " << at;
}

TEST(ExpF32, KeepsItsFixedPoints) {
  EXPECT_EQ(ExpF32(0.0f), 1.0f);
  EXPECT_EQ(ExpF32(-0.0f), 1.0f);
  EXPECT_EQ(ExpF32(std::nextafter(kExpMin, -100.0f)), 0.0f);
  EXPECT_GT(ExpF32(kExpMin), 0.0f);
  EXPECT_EQ(ExpF32(-HUGE_VALF), 0.0f);
  EXPECT_TRUE(std::isfinite(ExpF32(88.0f)));
}

// The ranking of tokens depends on this: a larger logit never gets a smaller bin.
TEST(ExpF32, GrowsOverStepsOfABin) {
  float before = 0;
  for (float x = kExpMin; x < 88; x += 1e-3f) {
    const float y = ExpF32(x);
    ASSERT_GT(y, before) << "at " << x;
    before = y;
  }
}

}  // namespace
}  // namespace spillway
