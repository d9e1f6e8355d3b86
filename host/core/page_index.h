#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"
#include "host/base/limits.h"
#include "host/core/histogram.h"

// What the index of a model with a rotation stores for each closed page, in addition to codes and
// factors. (A page is closed if it has all its kPageTokenCount rows.)
//   centre  bf16 [d]: c; codes are relative to it
//   norms   uint8 [kPageTokenCount]: logarithm of each value's distance from the value centre of
//           the page, plus the page's lift
// All rules here give the same bits on all devices: distances are computed as in RadiusOf(), and
// the order of each sum is stated.
namespace spillway {

// Number of closed pages of a sequence of token_count tokens.
SPILLWAY_HOST_DEVICE inline int64_t ClosedPages(int64_t token_count) {
  return token_count / kPageTokenCount;
}

// Centres and strays.

// A page's centre is the mean of its keys: summed in fp64 in token order, rounded to fp32, then to
// bf16 (to nearest, ties to even). If the largest distance of a key from it is more than
// kStrayFactor times the median distance, the centre is computed again: m is the per-coordinate
// median of the keys, and the centre is the mean, as before, of the keys whose distance from m is
// at most kStrayFactor times the median of these distances. The median of n numbers is number n / 2
// in ascending order, counted from 0.
inline constexpr float kStrayFactor = 4.0f;

// A key's distance from its centre. With x = k - c in fp32, largest is the largest |x_i|, and
// sum_of_squares is the sum of (x_i / largest)^2, one chain of fused multiply-adds. 0 for x = 0.
SPILLWAY_HOST_DEVICE inline float RadiusOf(float largest, float sum_of_squares) {
  return largest > 0 ? largest * ::sqrtf(sum_of_squares) : 0.0f;
}

// Whether a key is a stray: its code says too little about it, because it is unusually far from its
// centre, both for its page and for the sequence's first pages. Strays are always read, and sums of
// estimated weights leave them out.
SPILLWAY_HOST_DEVICE inline bool IsStray(float radius, float page_median, float first_median) {
  const float usual = page_median > first_median ? page_median : first_median;
  return radius > kStrayFactor * usual;
}

// At most this many strays per KV head are always read. With more, certificates carry no error
// bound.
inline constexpr int64_t kStrayCountMax = 1024;

// Values.

// Computed from the first kCentreTokenCount rows of a KV head; does not change afterwards.
struct HeadStatistics {
  float median_radius;    // median distance of keys from their pages' centres
  float value_reference;  // median of the non-zero distances of values; 1 if none
  float value_unit;       // PowerOfTwoBelow(value_reference); the unit of sums over values
  int32_t value_floor;    // ValueFloor()
};

// A page's value centre is, per coordinate, the median of kValueRunCount means. Each mean is taken
// over a run of neighbouring tokens, summed in fp64 in token order and rounded to fp32. So a few
// values that lie far away do not move it. A value's distance is that from its page's value centre,
// computed as in RadiusOf().
inline constexpr int kValueRunCount = 16;
inline constexpr int kValueRunTokens = kPageTokenCount / kValueRunCount;

// The first value centre of a KV head is, per coordinate, the median of the value centres of the
// kFirstPageCount first pages.
inline constexpr int kFirstPageCount = static_cast<int>(kCentreTokenCount / kPageTokenCount);

// The largest power of two that is not above x, limited to powers that fp32 can hold with their
// inverse. REQUIRES: x > 0.
SPILLWAY_HOST_DEVICE inline float PowerOfTwoBelow(float x) {
  const uint32_t exponent = std::bit_cast<uint32_t>(x) >> 23;
  return std::bit_cast<float>((exponent < 1 ? 1u : exponent > 252 ? 252u : exponent) << 23);
}

inline constexpr int kValueExponentMax = 127;
inline constexpr int kValueExponentMin = -127;
// The norm byte of a stray.
inline constexpr uint8_t kStrayNorm = 255;

// round(8 log2(distance / reference)), at least kValueExponentMin. If it is above
// kValueExponentMax, the token is a stray. REQUIRES: distance >= 0, reference > 0.
SPILLWAY_HOST_DEVICE inline int ValueExponent(float distance, float reference) {
  const float ratio = distance / reference;
  if (!(ratio >= 1.1754944e-38f)) return kValueExponentMin;  // 2^-126
  const uint32_t bits = std::bit_cast<uint32_t>(ratio);
  const int octave = static_cast<int>(bits >> 23) - 127;
  const float m = std::bit_cast<float>((bits & 0x007FFFFFu) | 0x3F800000u);
  int eighths = 0;  // number of thresholds 2^((j + 1/2) / 8) that m reaches
  eighths += m >= 1.04427378f;
  eighths += m >= 1.13878863f;
  eighths += m >= 1.24185781f;
  eighths += m >= 1.35425555f;
  eighths += m >= 1.47682615f;
  eighths += m >= 1.61049033f;
  eighths += m >= 1.75625216f;
  eighths += m >= 1.91520656f;
  const int exponent = 8 * octave + eighths;
  return exponent < kValueExponentMin ? kValueExponentMin : exponent;
}

// The value floor: smaller exponents are raised to it. A row affects the output by ||v - o||; if v
// is near the centre, that is about the distance of o itself from the centre. The floor corresponds
// to half of the reference. It is lower if most values are equal: then to the root mean square of
// (distance / reference) over the first rows, summed in fp64 in token order.
inline constexpr int kValueFloorMax = -8;
SPILLWAY_HOST_DEVICE inline int ValueFloor(double mean_square_ratio) {
  const int exponent = ValueExponent(static_cast<float>(::sqrt(mean_square_ratio)), 1.0f);
  return exponent < kValueFloorMax ? exponent : kValueFloorMax;
}

// Whether a sample of values tells enough about the others. It does not if only few values differ
// from the rest: if the root mean square of the distances is below a quarter of the reference.
inline constexpr int kValueFloorMin = -16;
SPILLWAY_HOST_DEVICE inline bool ValuesCanBeSampled(int value_floor) {
  return value_floor >= kValueFloorMin;
}

// The lift of a page, in eighths of an octave, is added to the exponents of all its values. If the
// values of a page lie near each other but far from those of other pages, all of them differ from
// the output by about the distance between the pages. The lift puts the page's usual value there,
// and those that lie far from their own page stand out as before, wherever the page's centre is.
// median_exponent: ValueExponent() of the page's median distance. centre_exponent: ValueExponent()
// of the distance of the page's value centre from the first value centre.
inline constexpr int kLiftMax = 64;
SPILLWAY_HOST_DEVICE inline int ValueLift(int median_exponent, int centre_exponent,
                                          int value_floor) {
  const int usual = median_exponent > value_floor ? median_exponent : value_floor;
  const int lift = centre_exponent - usual;
  return lift < 0 ? 0 : lift < kLiftMax ? lift : kLiftMax;
}

// The norm byte of a row. stray_key: IsStray() of its key.
SPILLWAY_HOST_DEVICE inline uint8_t NormByte(bool stray_key, int value_exponent, int value_floor,
                                             int lift) {
  if (stray_key || value_exponent > kValueExponentMax) return kStrayNorm;
  const int lifted = (value_exponent > value_floor ? value_exponent : value_floor) + lift;
  return static_cast<uint8_t>((lifted < kValueExponentMax ? lifted : kValueExponentMax) +
                              kValueExponentMax);
}

// The level of a page is the sum of its norm bytes. The usual level at a length of page_count
// closed pages is the median of the levels of the last page, and of the pages 1, 3, 7, 15, ...
// before it; 0 without a page. level_of(p): the level of page p.
inline constexpr int kUsualPagesMax = 32;
SPILLWAY_HOST_DEVICE inline int64_t UsualPage(int64_t page_count, int i) {
  return page_count - (int64_t{1} << i);  // negative: no page
}
template <typename LevelOf>
inline int UsualLevel(int64_t page_count, LevelOf level_of) {
  int levels[kUsualPagesMax];
  int count = 0;
  for (; count < kUsualPagesMax && UsualPage(page_count, count) >= 0; ++count) {
    const int level = level_of(UsualPage(page_count, count));
    int at = count;
    for (; at > 0 && levels[at - 1] > level; --at) levels[at] = levels[at - 1];
    levels[at] = level;
  }
  return count > 0 ? levels[count / 2] : 0;
}

// What ranks add to the exponents of a page whose level is below the usual one. If most pages are
// lifted, those near the first pages are as far from them as they are lifted.
SPILLWAY_HOST_DEVICE inline int RaiseOf(int level, int usual_level) {
  return usual_level > level ? (usual_level - level) / static_cast<int>(kPageTokenCount) : 0;
}

// Ranks.

// The bin of strays, above the bins of all scores.
inline constexpr int kStrayBin = kScoreBinCount - 1;

// The bin of score times value distance. One bin is a sixteenth of an octave, one step of a norm
// byte an eighth. raise: RaiseOf() of the page. Tokens that a first selection did not find keep
// their bin.
SPILLWAY_HOST_DEVICE inline int WeighBin(int bin, uint8_t norm, int raise) {
  if (bin == kNotFoundBin) return bin;
  if (norm == kStrayNorm) return kStrayBin;
  const int weighed = bin + 2 * (static_cast<int>(norm) - kValueExponentMax + raise);
  return weighed < 1 ? 1 : weighed < kStrayBin ? weighed : kStrayBin - 1;
}

}  // namespace spillway
