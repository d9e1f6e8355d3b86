#pragma once

#include <cmath>
#include <cstdint>

#include "host/base/half.h"

namespace spillway {

// Quantises the elements of a vector to four bits between their minimum and maximum, as Twilight's
// pruner does with keys (arXiv 2502.02770, appendix B.1): x is about low + step u, and u is an
// integer from 0 to 15. low and step are rounded to fp16 and always finite. u is computed from the
// rounded values, so that their rounding adds no error within the range.
struct Int4Range {
  float low = 0;
  float step = 0;

  // min, max: of the vector's elements.
  SPILLWAY_HOST_DEVICE static Int4Range Of(float min, float max) {
    return Unpack(static_cast<uint32_t>(HalfFromFloat((max - min) / 15.0f)) |
                  static_cast<uint32_t>(HalfFromFloat(min)) << 16);
  }
  // step is in the low 16 bits, low in the high 16 bits.
  SPILLWAY_HOST_DEVICE static Int4Range Unpack(uint32_t packed) {
    return {HalfToFloat(static_cast<uint16_t>(packed >> 16)),
            HalfToFloat(static_cast<uint16_t>(packed))};
  }
  SPILLWAY_HOST_DEVICE uint32_t Pack() const {
    return static_cast<uint32_t>(HalfFromFloat(step)) | static_cast<uint32_t>(HalfFromFloat(low))
                                                            << 16;
  }
  // The nearest u, ties to even; 0 if x is NaN, or if step is 0.
  SPILLWAY_HOST_DEVICE uint32_t Code(float x) const {
    if (!(step > 0)) return 0;
    const float u = ::nearbyintf((x - low) / step);
    return u > 0 ? static_cast<uint32_t>(u < 15 ? u : 15) : 0;
  }
  // Estimates q.x from dot = sum q u, summed by fused multiply-adds, and sum = sum q, summed by
  // additions, both over the elements in order from 0. Overflows if q is too large; see
  // CutEstimate().
  SPILLWAY_HOST_DEVICE float Dot(float dot, float sum) const {
    return ::fmaf(step, dot, low * sum);
  }
};

// Estimated logits are limited to this magnitude, and NaN becomes kEstimateMax. That is harmless:
// they only order keys, and an attend that reads a row with a non-finite logit reports it.
inline constexpr float kEstimateMax = 1e38f;
SPILLWAY_HOST_DEVICE inline float CutEstimate(float l) {
  const float low = l < kEstimateMax ? l : kEstimateMax;
  return low > -kEstimateMax ? low : -kEstimateMax;
}

}  // namespace spillway
