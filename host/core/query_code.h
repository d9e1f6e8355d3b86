#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/exp.h"

// The 4-bit query of `asymmetric`. Each element y of the rotated query becomes (w + 1/2) s, with an
// integer w in [-8, 7] and s = max |y| / 7.5. So products with codes are integers. One fixed order
// of fp32 operations gives the same bits on every device.
namespace spillway {

// s. It is 0 if all elements of the query are 0; such a query has no weights.
SPILLWAY_HOST_DEVICE inline float QueryStep(float largest) { return largest / 7.5f; }

// w for element y. -8 if the query is so large that y / step is NaN. REQUIRES: step > 0.
SPILLWAY_HOST_DEVICE inline int QueryLevel(float y, float step) {
  const float w = ::nearbyintf(y / step - 0.5f);
  const float cut = w > -8.0f ? w : -8.0f;
  return static_cast<int>(cut < 7.0f ? cut : 7.0f);
}

// 2w + 1: (w + 1/2) s = (2w + 1) s / 2, so odd integers represent the query.
SPILLWAY_HOST_DEVICE inline int QueryWeight(int level) { return 2 * level + 1; }

// A constant of the integer products: sum (2w+1)(2u - (2^B-1)) = 2 sum (2w+1) u + QueryOffset(),
// where u is the key's code with B bits per dimension. weight_sum: the sum of (2w+1).
SPILLWAY_HOST_DEVICE inline int32_t QueryOffset(int bits_per_dim, int32_t weight_sum) {
  return -((1 << bits_per_dim) - 1) * weight_sum;
}

// The factor that turns that sum, times the key's factor, into a logit times log2(e): the softmax
// scale, log2(e), half a step of the query and half a step of the codes. It is limited, so that its
// product with a key's factor is not NaN.
SPILLWAY_HOST_DEVICE inline float QueryCoefficient(float softmax_scale, float step,
                                                   float quantiser_step) {
  const float coefficient = softmax_scale * kExpLog2E * (step * (quantiser_step * 0.25f));
  return coefficient < 1.0e30f ? coefficient : 1.0e30f;
}

// (y - (w + 1/2) s)^2: the squared quantisation error of y. 0 for a query of zeros.
SPILLWAY_HOST_DEVICE inline float QueryErrorSquare(float y, int level, float step) {
  if (!(step > 0)) return 0.0f;
  const float error = ::fmaf(-(static_cast<float>(level) + 0.5f), step, y);
  return error * error;
}

// The order in which ||P q||^2 and ||P q - q~||^2 are summed in fp32. Dimensions, padded with
// zeros, are split into runs of kQueryRun. Within each run, terms that are 16, 8, 4, 2, 1 apart are
// added pairwise. Then the runs are added one after the other.
inline constexpr int kQueryRun = 32;

}  // namespace spillway
