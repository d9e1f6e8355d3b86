#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/limits.h"
#include "host/core/histogram.h"
#include "host/core/host_device.h"

// What the index of a model with a rotation keeps of a closed page, one that
// has all its kPageTokenCount rows, beside codes and factors:
//   centre  bf16 [d]: c, what codes are relative to
//   norms   uint8 [kPageTokenCount]: how far each value is from the usual one
// Every rule here is the same on all devices, to the bit: distances are
// RadiusOf(), orders of sums are given.
namespace spillway {

// Whether token_count tokens close the page.
SPILLWAY_HOST_DEVICE inline int64_t ClosedPages(int64_t token_count) {
  return token_count / kPageTokenCount;
}

// ---- Centres and strays ----------------------------------------------------

// A page's centre is the mean of its keys: summed in fp64 in token order,
// rounded to fp32, then to bf16 (nearest, ties to even). If a key lies further
// from it than kStrayFactor times the median distance, the centre is the mean,
// likewise, of those keys that lie within kStrayFactor times the median distance
// of their median per coordinate. The median of n numbers is the one at n / 2
// from below.
inline constexpr float kStrayFactor = 4.0f;

// A key's distance from its centre, from x = k - c in fp32: its largest element
// times the root of the sum of squares of x / largest, one chain of fused
// multiply-adds. 0 for x = 0.
SPILLWAY_HOST_DEVICE inline float RadiusOf(float largest, float sum_of_squares) {
  return largest > 0 ? largest * ::sqrtf(sum_of_squares) : 0.0f;
}

// Whether a key's code says too little of it: it lies further from its centre
// than is usual, both in its page and in the sequence's first pages. Such keys
// are strays: always read, and no part of what estimates are summed up to.
SPILLWAY_HOST_DEVICE inline bool IsStray(float radius, float page_median, float first_median) {
  const float usual = page_median > first_median ? page_median : first_median;
  return radius > kStrayFactor * usual;
}

// Strays of a KV head that are always read; more take the promise.
inline constexpr int64_t kStrayCountMax = 1024;

// ---- Values ------------------------------------------------------------------

// Of a KV head's first kCentreTokenCount rows; never changed after that.
struct HeadStatistics {
  float median_radius;    // of keys about their pages' centres
  float value_reference;  // median distance from the value centre, of those that are not 0; else 1
  float value_unit;       // PowerOfTwoBelow(value_reference): sums over values are in units of it
  int32_t value_floor;    // ValueFloor()
};

// The value centre: per coordinate the median of the means of
// kValueBlockCount runs of neighbouring tokens, each summed in fp64 in token
// order and rounded to fp32. A value's distance from it is as RadiusOf() says.
inline constexpr int kValueBlockCount = 16;

// Largest power of two that is not above x, within what fp32 and its inverse
// can hold. x > 0.
SPILLWAY_HOST_DEVICE inline float PowerOfTwoBelow(float x) {
  const uint32_t exponent = std::bit_cast<uint32_t>(x) >> 23;
  return std::bit_cast<float>((exponent < 1 ? 1u : exponent > 252 ? 252u : exponent) << 23);
}

inline constexpr int kValueExponentMax = 127;
inline constexpr int kValueExponentMin = -127;
// Norm byte of a stray.
inline constexpr uint8_t kStrayNorm = 255;

// round(8 log2(distance / reference)), at least kValueExponentMin; above
// kValueExponentMax the value is a stray. distance >= 0, reference > 0.
SPILLWAY_HOST_DEVICE inline int ValueExponent(float distance, float reference) {
  const float ratio = distance / reference;
  if (!(ratio >= 1.1754944e-38f)) return kValueExponentMin;  // 2^-126
  const uint32_t bits = std::bit_cast<uint32_t>(ratio);
  const int octave = static_cast<int>(bits >> 23) - 127;
  const float m = std::bit_cast<float>((bits & 0x007FFFFFu) | 0x3F800000u);
  int eighths = 0;  // thresholds 2^((j + 1/2) / 8) passed
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

// The norm byte of a row.
SPILLWAY_HOST_DEVICE inline uint8_t NormByte(bool stray_key, int value_exponent) {
  if (stray_key || value_exponent > kValueExponentMax) return kStrayNorm;
  return static_cast<uint8_t>(value_exponent + kValueExponentMax);
}

// Exponents below this count as this much in ranks: a row matters to the
// output by ||v - o||, which is about the output's own distance from the centre
// where v is nearer. Half of the reference, or less where most values are equal:
// then the root mean square of (distance / reference) over the first rows,
// summed in fp64 in token order.
inline constexpr int kValueFloorMax = -8;
SPILLWAY_HOST_DEVICE inline int ValueFloor(double mean_square_ratio) {
  const int exponent = ValueExponent(static_cast<float>(::sqrt(mean_square_ratio)), 1.0f);
  return exponent < kValueFloorMax ? exponent : kValueFloorMax;
}

// Whether values differ enough for a sample to say what the others are: not
// where so few differ from the rest that their root mean square is below a
// quarter of their median.
inline constexpr int kValueFloorMin = -16;
SPILLWAY_HOST_DEVICE inline bool ValuesCanBeSampled(int value_floor) {
  return value_floor >= kValueFloorMin;
}

// ---- Ranks -------------------------------------------------------------------

// The bin of strays, above those of all scores.
inline constexpr int kStrayBin = kScoreBinCount - 1;

// A score's bin times the value's distance: a bin is a sixteenth of an octave,
// a norm byte an eighth. Tokens that a first selection did not find stay where
// they are.
SPILLWAY_HOST_DEVICE inline int WeighBin(int bin, uint8_t norm, int value_floor) {
  if (bin == kNotFoundBin) return bin;
  if (norm == kStrayNorm) return kStrayBin;
  const int exponent = static_cast<int>(norm) - kValueExponentMax;
  const int weighed = bin + 2 * (exponent > value_floor ? exponent : value_floor);
  return weighed < 1 ? 1 : weighed < kStrayBin ? weighed : kStrayBin - 1;
}

}  // namespace spillway
