#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/half.h"

namespace spillway {

// Elements in four bits between the smallest and the largest of a vector, as
// Twilight's pruner keeps keys (arXiv 2502.02770, appendix B.1): x is about
// low + step u, u in [0, 15]. Both numbers are fp16; u is taken against what
// they really are, so that their rounding costs nothing within the range.
struct Int4Range {
  float low = 0;
  float step = 0;

  // min and max of the vector.
  SPILLWAY_HOST_DEVICE static Int4Range Of(float min, float max) {
    return Unpack(static_cast<uint32_t>(HalfFromFloat((max - min) / 15.0f)) |
                  static_cast<uint32_t>(HalfFromFloat(min)) << 16);
  }
  // step in the low half, low in the high one.
  SPILLWAY_HOST_DEVICE static Int4Range Unpack(uint32_t packed) {
    return {HalfToFloat(static_cast<uint16_t>(packed >> 16)),
            HalfToFloat(static_cast<uint16_t>(packed))};
  }
  SPILLWAY_HOST_DEVICE uint32_t Pack() const {
    return static_cast<uint32_t>(HalfFromFloat(step)) | static_cast<uint32_t>(HalfFromFloat(low))
                                                            << 16;
  }
  // The nearest u, ties to even; 0 for NaN.
  SPILLWAY_HOST_DEVICE uint32_t Code(float x) const {
    if (!(step > 0)) return 0;
    const float u = ::nearbyintf((x - low) / step);
    return u > 0 ? static_cast<uint32_t>(u < 15 ? u : 15) : 0;
  }
  // q.x from dot = sum q u and sum = sum q: both chains of fused multiply-adds,
  // or additions, over the elements in order from 0. Finite for finite q; see
  // EstimateMax.
  SPILLWAY_HOST_DEVICE float Dot(float dot, float sum) const {
    return ::fmaf(step, dot, low * sum);
  }
};

// Estimated logits are cut to this, NaN to it: they only order keys, and an
// attend that reads a row that is not finite says so.
inline constexpr float kEstimateMax = 1e38f;
SPILLWAY_HOST_DEVICE inline float CutEstimate(float l) {
  const float low = l < kEstimateMax ? l : kEstimateMax;
  return low > -kEstimateMax ? low : -kEstimateMax;
}

}  // namespace spillway
