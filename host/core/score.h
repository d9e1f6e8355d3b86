#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/limits.h"
#include "host/core/exp.h"

namespace spillway {

// A key's score for a group is sum_h w_h 2^min(x_h - M_h, kScoreMax), over the group's query heads
// in order, by fused multiply-adds from 0. x_h is the estimated logit times log2(e). M_h is the
// largest x_h of a sample of the keys, and 1 / w_h is the sample's sum of 2^(x_h - M_h). If pages
// have centres, the centre logits of all scored pages belong to the sample too (CentreMass()), so
// that a few pages with most of a head's mass are not missed. So the score is the sum of the heads'
// softmax weights, except for a factor that is the same for all keys. Scores only order the keys.
// x_h is rounded before M_h is subtracted. So the largest x_h gives exactly 2^0, however large it
// is. kScoreMax allows keys above the sample's maximum; if the sample missed much, heads are
// weighted by their sums over all keys (HeadShares). kScoreMin keeps scores above the subnormal
// numbers.
inline constexpr float kScoreMax = 80.0f;
inline constexpr float kScoreMin = -90.0f;
inline constexpr float kScoreRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
inline constexpr float kScoreC0 = 0.999999166f;
inline constexpr float kScoreC1 = 0.69312191f;
inline constexpr float kScoreC2 = 0.240249842f;
inline constexpr float kScoreC3 = 0.0559173673f;
inline constexpr float kScoreC4 = 0.00956046395f;

// The sample's x_h are limited to this magnitude. So M_h is finite, and no difference x_h - M_h is
// NaN, though it may be infinite.
inline constexpr float kScoreLogitMax = 1e38f;

// x_h of a sampled logit l in nats. l is not NaN.
SPILLWAY_HOST_DEVICE inline float OracleScore(float l) {
  const float low = l < kScoreLogitMax ? l : kScoreLogitMax;
  return (low > -kScoreLogitMax ? low : -kScoreLogitMax) * kExpLog2E;
}

// 2^x for a score. x is limited to [kScoreMin, kScoreMax]. REQUIRES: x is not NaN. One fixed order
// of fp32 operations gives the same bits on every device. The relative error is below 1e-5, far
// below the width of a score bin (least squares on Chebyshev nodes of [-1/2, 1/2]). The SIMD
// version is in host/cpu/simd_math-inl.h.
SPILLWAY_HOST_DEVICE inline float ScoreExp2(float x) {
  x = x < kScoreMax ? x : kScoreMax;
  x = x > kScoreMin ? x : kScoreMin;
  const float t = x + kScoreRound;
  const float r = x - (t - kScoreRound);
  float p = ::fmaf(kScoreC4, r, kScoreC3);
  p = ::fmaf(p, r, kScoreC2);
  p = ::fmaf(p, r, kScoreC1);
  p = ::fmaf(p, r, kScoreC0);
  // The low bits of t are the integer part of x; the shift drops all other bits.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(t) << 23));
}

// 1 / w_h is summed in fixed point with this many fraction bits, so that every order gives the same
// bits. Sums over up to 2^33 keys do not overflow.
inline constexpr int kScoreMassBits = 30;

// What one key of the sample adds to the sum. REQUIRES: x <= max.
SPILLWAY_HOST_DEVICE inline uint64_t ScoreMass(float x, float max) {
  return static_cast<uint64_t>(ScoreExp2(x - max) * static_cast<float>(1 << kScoreMassBits));
}

// What a page's centre logit adds to the sum: as much as the kPageTokenCount / 64 keys that a
// sample of every 64th key would take from the page.
SPILLWAY_HOST_DEVICE inline uint64_t CentreMass(float x, float max) {
  constexpr uint64_t kKeys = kPageTokenCount / 64;
  return kKeys * ScoreMass(x, max);
}

// w_h, given the sum over the sample. REQUIRES: mass > 0.
SPILLWAY_HOST_DEVICE inline float ScoreHeadWeight(uint64_t mass) {
  return static_cast<float>(1 << kScoreMassBits) / static_cast<float>(mass);
}

}  // namespace spillway
