#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/limits.h"
#include "host/core/exp.h"

namespace spillway {

// A key's score for a group is sum_h w_h 2^min(x_h - M_h, kScoreMax) over its
// query heads in order, by fused multiply-adds from 0: x_h is the estimated
// logit times log2(e), M_h the largest x_h of a sample of the keys and 1 / w_h
// the sample's sum of 2^(x_h - M_h). Where pages have centres, the centre logits
// of all scored pages belong to the sample too (CentreMass()): a few pages that
// hold the mass of a head are not missed. So a score is the sum of the heads'
// softmax weights but for a factor that all keys share, and only orders keys.
// x_h is rounded before M_h is taken from it: however large, the largest gives 2^0.
// kScoreMax leaves a sample room to have missed the largest: then heads are weighted
// by their sums over all keys (HeadShares). kScoreMin keeps scores above the
// subnormal numbers.
inline constexpr float kScoreMax = 80.0f;
inline constexpr float kScoreMin = -90.0f;
inline constexpr float kScoreRound = 12582912.0f;  // 1.5 * 2^23: adds to an integer
inline constexpr float kScoreC0 = 0.999999166f;
inline constexpr float kScoreC1 = 0.69312191f;
inline constexpr float kScoreC2 = 0.240249842f;
inline constexpr float kScoreC3 = 0.0559173673f;
inline constexpr float kScoreC4 = 0.00956046395f;

// The sample's x_h are cut to this: from a finite M_h every difference is a
// number, if an infinite one.
inline constexpr float kScoreLogitMax = 1e38f;

// x_h of a sampled exact logit l, finite, in nats.
SPILLWAY_HOST_DEVICE inline float OracleScore(float l) {
  const float low = l < kScoreLogitMax ? l : kScoreLogitMax;
  return (low > -kScoreLogitMax ? low : -kScoreLogitMax) * kExpLog2E;
}

// 2^x for a score: x is clamped to [kScoreMin, kScoreMax], not NaN. One fixed
// order of fp32 operations, the same bits on every device; relative error
// below 1e-5, far below a score bin's width (least squares on Chebyshev nodes
// of [-1/2, 1/2]). The SIMD form stands in host/cpu/simd_math-inl.h.
SPILLWAY_HOST_DEVICE inline float ScoreExp2(float x) {
  x = x < kScoreMax ? x : kScoreMax;
  x = x > kScoreMin ? x : kScoreMin;
  const float t = x + kScoreRound;
  const float r = x - (t - kScoreRound);
  float p = ::fmaf(kScoreC4, r, kScoreC3);
  p = ::fmaf(p, r, kScoreC2);
  p = ::fmaf(p, r, kScoreC1);
  p = ::fmaf(p, r, kScoreC0);
  // t's low bits are the integer part; the rest of it is shifted out.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(t) << 23));
}

// w_h's inverse is summed in fixed point, so that every order gives the same
// bits; 2^33 keys do not overflow.
inline constexpr int kScoreMassBits = 30;

// What a key of the sample adds to the sum; x is at most max.
SPILLWAY_HOST_DEVICE inline uint64_t ScoreMass(float x, float max) {
  return static_cast<uint64_t>(ScoreExp2(x - max) * static_cast<float>(1 << kScoreMassBits));
}

// What a page's centre logit adds: as many keys as a sample of every 64th has of
// a page.
SPILLWAY_HOST_DEVICE inline uint64_t CentreMass(float x, float max) {
  constexpr uint64_t kKeys = kPageTokenCount / 64;
  return kKeys * ScoreMass(x, max);
}

// w_h of the sum over the sample, which is not 0.
SPILLWAY_HOST_DEVICE inline float ScoreHeadWeight(uint64_t mass) {
  return static_cast<float>(1 << kScoreMassBits) / static_cast<float>(mass);
}

}  // namespace spillway
