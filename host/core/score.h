#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "host/core/exp.h"

namespace spillway {

// A key's score for a group is sum_h 2^min(x_h - R_h, kScoreMax) over its query
// heads in order, x_h the estimated logit times log2(e), R_h a large one of
// them: it only orders keys. kScoreMax is 20 nats.
inline constexpr float kScoreMax = 28.8539008f;
inline constexpr float kScoreMin = -125.0f;
inline constexpr float kScoreRound = 12582912.0f;  // 1.5 * 2^23: adds to an integer
inline constexpr float kScoreC0 = 0.999999166f;
inline constexpr float kScoreC1 = 0.69312191f;
inline constexpr float kScoreC2 = 0.240249842f;
inline constexpr float kScoreC3 = 0.0559173673f;
inline constexpr float kScoreC4 = 0.00956046395f;

// Logits are cut to this before their differences are taken, which then stay
// finite.
inline constexpr float kScoreLogitMax = 1e38f;

// x_h of an exact logit l, finite, in nats.
inline float OracleScore(float l) {
  return std::max(std::min(l, kScoreLogitMax), -kScoreLogitMax) * kExpLog2E;
}

// 2^x for a score: x is clamped to [kScoreMin, kScoreMax], not NaN. One fixed
// order of fp32 operations, the same bits on every device; relative error
// below 1e-5, far below a score bin's width (least squares on Chebyshev nodes
// of [-1/2, 1/2]). The SIMD form stands in host/cpu/simd_math-inl.h.
inline float ScoreExp2(float x) {
  x = std::max(std::min(x, kScoreMax), kScoreMin);
  const float t = x + kScoreRound;
  const float r = x - (t - kScoreRound);
  float p = std::fma(kScoreC4, r, kScoreC3);
  p = std::fma(p, r, kScoreC2);
  p = std::fma(p, r, kScoreC1);
  p = std::fma(p, r, kScoreC0);
  // t's low bits are the integer part; the rest of it is shifted out.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(t) << 23));
}

}  // namespace spillway
