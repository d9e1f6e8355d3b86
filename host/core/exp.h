#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"

namespace spillway {

// exp(x) in fp32, with the same bits on every device: one fixed order of fp32 operations, every fma
// explicit. The relative error is below 2e-7 for x in [kExpMin, 88]; below kExpMin the result is 0.
// REQUIRES: x <= 88, not NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and exp(r) = 1 + r + r^2 Q(r), where Q is a polynomial of
// degree 4, fitted by least squares on Chebyshev nodes. The SIMD version is in
// host/cpu/simd_math-inl.h; a test compares the two.
inline constexpr float kExpMin = -87.0f;
inline constexpr float kExpLog2E = 1.44269504f;
inline constexpr float kExpRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
inline constexpr float kExpLn2Hi = 0.693359375f;
inline constexpr float kExpLn2Lo = -2.12194440e-4f;
inline constexpr float kExpQ0 = 0.5f;
inline constexpr float kExpQ1 = 0.166665167f;
inline constexpr float kExpQ2 = 0.0416662619f;
inline constexpr float kExpQ3 = 0.00836915895f;
inline constexpr float kExpQ4 = 0.00139464578f;

SPILLWAY_HOST_DEVICE inline float ExpF32(float x) {
  if (x < kExpMin) return 0.0f;
  const float t = ::fmaf(x, kExpLog2E, kExpRound);
  const float n = t - kExpRound;
  float r = ::fmaf(n, -kExpLn2Hi, x);
  r = ::fmaf(n, -kExpLn2Lo, r);
  float q = kExpQ4;
  q = ::fmaf(q, r, kExpQ3);
  q = ::fmaf(q, r, kExpQ2);
  q = ::fmaf(q, r, kExpQ1);
  q = ::fmaf(q, r, kExpQ0);
  const float p = ::fmaf(q, r * r, r + 1.0f);
  const int32_t exponent = std::bit_cast<int32_t>(t) - std::bit_cast<int32_t>(kExpRound);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}

}  // namespace spillway
