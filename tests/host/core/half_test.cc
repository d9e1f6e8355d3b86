#include "host/base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/reference/elements.h"

namespace spillway {
namespace {

constexpr uint16_t kLargest = 0x7BFF;  // 65504
constexpr float kInf = std::numeric_limits<float>::infinity();

// The value of a half, by the definition of its fields.
double ValueOf(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

bool IsFinite(uint16_t half) { return (half >> 10 & 31) != 31; }

TEST(Half, EveryFiniteOneIsItsValueAndComesBack) {
  int finite = 0;
  for (int h = 0; h < 65536; ++h) {
    const auto half = static_cast<uint16_t>(h);
    if (!IsFinite(half)) {
      // Not finite: the conversion gives the largest number.
      ASSERT_EQ(HalfFromFloat(HalfToFloat(half)), (half & 0x8000) | kLargest) << h;
      continue;
    }
    ++finite;
    ASSERT_EQ(HalfToFloat(half), ValueOf(half)) << h;
    ASSERT_EQ(std::signbit(HalfToFloat(half)), (half & 0x8000) != 0) << h;
    ASSERT_EQ(HalfFromFloat(HalfToFloat(half)), half) << h;
  }
  EXPECT_EQ(finite, 65536 - 2 * 1024);
}

// Between two neighbours, the middle goes to the even one. Numbers on either side of the middle go
// to the nearer one.
TEST(Half, RoundsToTheNearestTiesToEven) {
  for (uint16_t half = 0; half < kLargest; ++half) {
    const auto next = static_cast<uint16_t>(half + 1);
    const auto middle = static_cast<float>((ValueOf(half) + ValueOf(next)) / 2);
    const uint16_t even = half % 2 == 0 ? half : next;
    for (const int sign : {0, 0x8000}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      ASSERT_EQ(HalfFromFloat(s * middle), even | sign) << half;
      ASSERT_EQ(HalfFromFloat(s * std::nextafterf(middle, 0)), half | sign) << half;
      ASSERT_EQ(HalfFromFloat(s * std::nextafterf(middle, kInf)), next | sign) << half;
    }
  }
}

TEST(Half, SaturatesAndKnowsNoInfinityOrNan) {
  for (const float x :
       {65504.0f, 65519.996f, 65520.0f, 65536.0f, 1e30f, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(HalfFromFloat(x), kLargest) << x;
    EXPECT_EQ(HalfFromFloat(-x), kLargest | 0x8000) << x;
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(HalfFromFloat(std::copysign(nan, 1.0f)), kLargest);
  EXPECT_EQ(HalfFromFloat(std::copysign(nan, -1.0f)), kLargest | 0x8000);
}

TEST(Half, VerySmallOnesBecomeZeroOfTheirSign) {
  const float half_least = std::ldexp(1.0f, -25);  // ties with 0, which is even
  for (const float x : {0.0f, std::numeric_limits<float>::denorm_min(),
                        std::numeric_limits<float>::min(), half_least}) {
    EXPECT_EQ(HalfFromFloat(x), 0) << x;
    EXPECT_EQ(HalfFromFloat(-x), 0x8000) << x;
  }
  EXPECT_EQ(HalfFromFloat(std::nextafterf(half_least, 1)), 1);
}

TEST(Half, AgreesWithRoundingInDouble) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-26, 15.9f), sign(-1, 1);
  for (int i = 0; i < 100000; ++i) {
    const float x = std::copysign(std::exp2(exponent(random)), sign(random));
    ASSERT_EQ(HalfToFloat(HalfFromFloat(x)), reference::Round(DType::kF16, x)) << x;
  }
}

}  // namespace
}  // namespace spillway
