#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/exp.h"

namespace spillway {

// exp(own - max), the factor that converts sums relative to `own` into sums relative to max >= own.
// 0 if own is -infinity, the maximum of the empty state.
SPILLWAY_HOST_DEVICE inline float SoftmaxFactor(float own, float max) {
  if (own == -HUGE_VALF) return 0.0f;
  return own == max ? 1.0f : ExpF32(own - max);
}

// Online softmax state over rows with logits s_i and x_i = exp(s_i - max): the softmax denominator,
// and the second moments that a sampled stratum needs. The caller stores the vectors sum x v (the
// numerator) and sum x^2 v. Starts as Empty(). All sums are fp32.
struct alignas(16) SoftmaxSums {
  float max;
  float sum;          // sum x
  float sum_sq;       // sum x^2          (moments only)
  float sum_sq_norm;  // sum x^2 ||v||^2  (moments only)

  // The state of no rows: merging it changes nothing.
  SPILLWAY_HOST_DEVICE static SoftmaxSums Empty() { return {-HUGE_VALF, 0, 0, 0}; }

  // The factors for the vectors of the two states before they are added: sums of x v are multiplied
  // by the factor, sums of x^2 v by its square.
  struct Factors {
    float keep;  // for this state
    float take;  // for the other state
  };
  // *this += from, a state over other rows. max becomes the larger of the two maxima.
  SPILLWAY_HOST_DEVICE Factors Merge(const SoftmaxSums& from) {
    const float larger = max > from.max ? max : from.max;
    const float keep = SoftmaxFactor(max, larger);
    const float take = SoftmaxFactor(from.max, larger);
    max = larger;
    sum = ::fmaf(sum, keep, from.sum * take);
    sum_sq = ::fmaf(sum_sq, keep * keep, from.sum_sq * (take * take));
    sum_sq_norm = ::fmaf(sum_sq_norm, keep * keep, from.sum_sq_norm * (take * take));
    return {keep, take};
  }
};

// SoftmaxSums with the number of rows.
struct RowSums : SoftmaxSums {
  RowSums() : SoftmaxSums(Empty()) {}
  RowSums(const SoftmaxSums& sums, int64_t count) : SoftmaxSums(sums), count(count) {}

  int64_t count = 0;
};

}  // namespace spillway
