#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"
#include "host/core/exp.h"
#include "host/core/rank_error.h"

// Value codes: what the index of a model with value_bits > 0 stores for the values of each closed
// page, and how an answer is computed from codes alone.
//
// With logits l_i, x_i = exp(l_i - M) and rows v_i, attention is sum x_i v_i / sum x_i. The codes
// estimate each term: x^_i from the key's code, v^_i from the value's. A tail is then
//   sum over the tail of x^_i v^_i  +  sum over strata (n_h / r_h) sum over sampled rows of
//                                      (x_i v_i - x^_i v^_i),
// a control variate: it is unbiased whatever x^ and v^ are, as long as the same x^_i v^_i is added
// for the whole tail and subtracted for the rows. The better the codes, the smaller the variance.
//
// All rules here give the same bits on all devices.
namespace spillway {

// ---- x^ ----------------------------------------------------------------

// x^ is kept as a level of 8 bits for each token and query head: 0 for x^ = 0, else x^ is
// 2^((level - kLevelZero) / kLevelsPerOctave), in units of 2^M_h (host/core/score.h). One step is a
// quarter of an octave: the rounding is small beside the error of estimated logits.
inline constexpr int kLevelsPerOctave = 4;
inline constexpr int kLevelZero = 192;
inline constexpr int kLevelMax = 255;

// An estimated logit has the variance s^2, so exp() of it is too large by exp(s^2 / 2) on average.
// x^ corrects for that, by at most exp(kLogitVarianceMax / 2): beyond it, codes say little.
inline constexpr float kLogitVarianceMax = 2.0f;

// What a query head's levels are lowered by per f^2, where f is the factor of a key's code: half of
// RankErrorScale(), in levels.
inline constexpr float kLevelsPerNat = static_cast<float>(kLevelsPerOctave) * kExpLog2E;
inline constexpr float kShrinkMax = 0.5f * kLogitVarianceMax * kLevelsPerNat;
SPILLWAY_HOST_DEVICE inline float LevelShrinkage(double rank_error_scale) {
  const float x = static_cast<float>(rank_error_scale) * (0.5f * kLevelsPerNat);
  return x < 3.0e38f ? x : 3.0e38f;
}

// The level of a token. x: x_h - M_h of host/core/score.h, in octaves; not NaN. factor_square: f^2,
// at most kFactorSquareMax.
SPILLWAY_HOST_DEVICE inline uint8_t ValueLevel(float x, float factor_square, float shrinkage) {
  const float product = factor_square * shrinkage;
  const float shrink = product < kShrinkMax ? product : kShrinkMax;
  const float level = ::nearbyintf(
      ::fmaf(x, static_cast<float>(kLevelsPerOctave), static_cast<float>(kLevelZero)) - shrink);
  if (!(level >= 1.0f)) return 0;
  return static_cast<uint8_t>(level < kLevelMax ? level : static_cast<float>(kLevelMax));
}

// x^ of a level, in units of 2^M_h.
SPILLWAY_HOST_DEVICE inline float LevelWeight(uint8_t level) {
  static_assert(kLevelsPerOctave == 4);
  if (level == 0) return 0.0f;
  const int quarter = level & 3;
  const float mantissa = quarter == 0   ? 1.0f
                         : quarter == 1 ? 1.18920711f
                         : quarter == 2 ? 1.41421356f
                                        : 1.68179283f;
  const int exponent = (level >> 2) - kLevelZero / kLevelsPerOctave;
  return std::bit_cast<float>(std::bit_cast<int32_t>(mantissa) + (exponent << 23));
}

// The estimated logit, in nats, that a level stands for; level is not 0. reference: M_h.
SPILLWAY_HOST_DEVICE inline float LevelLogit(uint8_t level, float reference) {
  constexpr float kLn2 = 0.693147181f;
  const float octaves = static_cast<float>(static_cast<int>(level) - kLevelZero) *
                        (1.0f / static_cast<float>(kLevelsPerOctave));
  return (reference + octaves) * kLn2;
}

// ---- v^ ----------------------------------------------------------------

// Per closed page and KV head:
//   value centre  bf16 [d]: the page's value centre (host/core/page_index.h), rounded
//   value factors bf16 [kPageTokenCount]: g
//   value codes   value_bits per dimension: u
// With w = v - centre and y = sqrt(d) H w / ||w||, where H is the orthogonal transform below,
// u_j = clamp(floor(y_j / step) + 2^(B-1), 0, 2^B - 1), t_j = u_j - (2^B - 1) / 2. The factor is
// that of least squares, g = <H w, t> / <t, t>, so that g H^T t is as close to w as it can be.
//   v^ = centre + g H^T t.

// H: signs, then a Walsh-Hadamard transform. Its length is the largest power of two m <= d. If
// m < d, it transforms dimensions [0, m), and then [d - m, d) with other signs. After each
// transform, entries are multiplied by HadamardScale(). H^T is the reverse.
SPILLWAY_HOST_DEVICE constexpr int HadamardSize(int dim) {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(dim)));
}
SPILLWAY_HOST_DEVICE constexpr int HadamardCount(int dim) {
  return HadamardSize(dim) == dim ? 1 : 2;
}
SPILLWAY_HOST_DEVICE inline float HadamardScale(int dim) {
  return static_cast<float>(1 / ::sqrt(static_cast<double>(HadamardSize(dim))));
}

// The signs of transform `part`: whether entry i of its range is negated before it. They are fixed:
// outlier channels are spread over all dimensions whatever the signs are, and no guarantee rests on
// them.
SPILLWAY_HOST_DEVICE inline bool HadamardNegates(int part, int i) {
  uint32_t h = static_cast<uint32_t>(i) * 0x9E3779B9u + static_cast<uint32_t>(part) * 0x7F4A7C15u +
               0x68616461u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  return (h >> 15 & 1u) != 0;
}

// The order of a transform of length m: for span = 1, 2, 4, ..., m / 2, entries a and b that are
// `span` apart, with bit `span` of a's index clear, become a + b and a - b.

// ---- predicted variances -------------------------------------------------

// Codes also say how far a row may be from their estimate, so that the rows that a bound needs are
// known before any of them is read. With s^2 the variance of an estimated logit, w = v - centre and
// D the distortion of the values' quantiser, a row's r = x (v - o) - x^ (v^ - o) has about the
// variance
//   x^^2 [(e^(s^2) - 1) (||w||^2 + ||centre - o||^2) + e^(s^2) D ||w||^2].
// ||w||^2 is about g^2 d SquareOfFactor(). For ||centre - o||^2 a head takes the mean over its
// pages, weighted by their sums of x^.
struct PredictedTerms {
  float of_value;   // x^^2 ||w||^2 [e^(s^2) (1 + D) - 1]
  float of_centre;  // x^^2 [e^(s^2) - 1], to be multiplied by ||centre - o||^2
};

// ||w||^2 / (g^2 d): E[t^2] / (1 - D) for a standard normal coordinate.
SPILLWAY_HOST_DEVICE constexpr float SquareOfFactor(int value_bits) {
  constexpr double kMeanSquare[] = {0.25, 0.8879, 2.8013};
  return static_cast<float>(kMeanSquare[value_bits - 1] / (1 - QuantiserDistortion(value_bits)));
}

// estimate: x^ of a token. logit_variance: s^2, at most kLogitVarianceMax.
SPILLWAY_HOST_DEVICE inline PredictedTerms PredictTerms(float estimate, float logit_variance,
                                                        float value_square, float distortion) {
  const float square = estimate * estimate;
  const float growth = ExpF32(logit_variance);
  return {square * value_square * (growth * (1 + distortion) - 1), square * (growth - 1)};
}

// s^2 of a token. factor_square and shrinkage as for ValueLevel().
SPILLWAY_HOST_DEVICE inline float LogitVariance(float factor_square, float shrinkage) {
  constexpr float kPerShrinkage = 2.0f / kLevelsPerNat;
  const float variance = factor_square * shrinkage * kPerShrinkage;
  return variance < kLogitVarianceMax ? variance : kLogitVarianceMax;
}

// Sums over the tokens of a stratum that count, for one query head.
struct PredictedSums {
  double of_value = 0;
  double of_centre = 0;
  int64_t count = 0;

  // The predicted variance of one row; 0 if no token counts. centre_square: ||centre - o||^2.
  SPILLWAY_HOST_DEVICE double Variance(double centre_square) const {
    return count > 0 ? (of_value + of_centre * centre_square) / static_cast<double>(count) : 0.0;
  }
};

// Tokens of small strata count wherever they are; those of a stratum of more tokens than this only
// in the pages of ReferencePages.
inline constexpr int64_t kNearStratumTokens = 1024;

// ---- the sums ----------------------------------------------------------

// Codes are summed for the pages that carry mass; for the others, centres alone stand for the
// values. A page's share is, for one query head, its RankSums::weight divided by that of all pages;
// so it is known when the tokens have scores. Codes of a page are summed if the largest share of
// the group is at least kPageShareMin of the mean page's.
inline constexpr double kPageShareMin = 0.25;
SPILLWAY_HOST_DEVICE inline bool PageHasMass(double page_sum, double sum, int64_t page_count) {
  return page_sum * static_cast<double>(page_count) >= kPageShareMin * sum && page_sum > 0;
}

// A page's sum of g x^ t is computed with integer weights, in 0 .. kCodeWeightMax, so that every
// order of additions gives the same bits. largest: the largest g x^ of the tail's tokens of a page
// that has mass, else 0.
inline constexpr int kCodeWeightMax = 127;
// Whether g x^ is so small or large that fp32 cannot hold its inverse. Then codes have weight 0.
SPILLWAY_HOST_DEVICE inline bool HasCodeWeights(float largest) {
  return largest > 1.0e-36f && largest < 1.0e37f;
}
SPILLWAY_HOST_DEVICE inline float CodeWeightInverse(float largest) {
  return HasCodeWeights(largest) ? static_cast<float>(kCodeWeightMax) / largest : 0.0f;
}
SPILLWAY_HOST_DEVICE inline float CodeWeightUnit(float largest) {
  return HasCodeWeights(largest) ? largest / static_cast<float>(kCodeWeightMax) : 0.0f;
}
// The integer weight of a token. product: g x^. inverse: CodeWeightInverse(); if it is 0, so is the
// weight.
SPILLWAY_HOST_DEVICE inline int CodeWeight(float product, float inverse) {
  if (inverse == 0) return 0;
  const float weight = ::nearbyintf(product * inverse);
  return weight < static_cast<float>(kCodeWeightMax) ? static_cast<int>(weight) : kCodeWeightMax;
}

}  // namespace spillway
