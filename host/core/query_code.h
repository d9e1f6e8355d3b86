#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/exp.h"

// The 4-bit query of `asymmetric`: a rotated query y is (w + 1/2) s per
// dimension, w in [-8, 7] and s = max |y| / 7.5, so that products with codes
// are integers. One fixed order of fp32 operations, equal on every device.
namespace spillway {

// s; 0 for a query of zeros, which has no weights.
SPILLWAY_HOST_DEVICE inline float QueryStep(float largest) { return largest / 7.5f; }

// w of y; -8 where a query is so long that y / step is no number. REQUIRES: step > 0.
SPILLWAY_HOST_DEVICE inline int QueryLevel(float y, float step) {
  const float w = ::nearbyintf(y / step - 0.5f);
  const float cut = w > -8.0f ? w : -8.0f;
  return static_cast<int>(cut < 7.0f ? cut : 7.0f);
}

// (w + 1/2) s = (2 w + 1) s / 2: odd integers stand for the query.
SPILLWAY_HOST_DEVICE inline int QueryWeight(int level) { return 2 * level + 1; }

// sum (2w+1)(2u - (2^B-1)) = 2 sum (2w+1) u + QueryOffset(), u the key's code
// of B bits a dimension; weight_sum: of (2w+1).
SPILLWAY_HOST_DEVICE inline int32_t QueryOffset(int bits_per_dim, int32_t weight_sum) {
  return -((1 << bits_per_dim) - 1) * weight_sum;
}

// What that sum and a key's factor are multiplied by to be a logit times
// log2(e): half a step of the query times half of the codes'. Cut, so that
// with a factor it stays a number.
SPILLWAY_HOST_DEVICE inline float QueryCoefficient(float softmax_scale, float step,
                                                   float quantiser_step) {
  const float coefficient = softmax_scale * kExpLog2E * (step * (quantiser_step * 0.25f));
  return coefficient < 1.0e30f ? coefficient : 1.0e30f;
}

// (y - (w + 1/2) s)^2: what the level misses of y, 0 for a query of zeros.
SPILLWAY_HOST_DEVICE inline float QueryErrorSquare(float y, int level, float step) {
  if (!(step > 0)) return 0.0f;
  const float error = ::fmaf(-(static_cast<float>(level) + 0.5f), step, y);
  return error * error;
}

// ||P q||^2 and ||P q - q~||^2 are summed in fp32: runs of kQueryRun neighbouring
// dimensions, padded with 0, each in pairs that lie 16, 8, 4, 2, 1 apart; then
// the runs in turn.
inline constexpr int kQueryRun = 32;

}  // namespace spillway
