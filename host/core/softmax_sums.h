#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/exp.h"

namespace spillway {

// exp(own - max): what sums relative to `own` are multiplied by to be relative
// to max >= own; 0 for the empty state's maximum, -infinity.
SPILLWAY_HOST_DEVICE inline float SoftmaxFactor(float own, float max) {
  if (own == -HUGE_VALF) return 0.0f;
  return own == max ? 1.0f : ExpF32(own - max);
}

// Online softmax over rows with logits s_i, x_i = exp(s_i - max): a softmax
// denominator, with the second moments that a sampled stratum needs. The
// numerator sum x v, and sum x^2 v, lie where the caller has them. Starts as
// Empty(). All sums in fp32.
struct alignas(16) SoftmaxSums {
  float max;
  float sum;          // sum x
  float sum_sq;       // sum x^2          (moments only)
  float sum_sq_norm;  // sum x^2 ||v||^2  (moments only)

  // Of no rows: neutral in Merge().
  SPILLWAY_HOST_DEVICE static SoftmaxSums Empty() { return {-HUGE_VALF, 0, 0, 0}; }

  // What vectors that belong to the two states are multiplied by before they
  // are added: sums of x v by the factors, of x^2 v by their squares.
  struct Factors {
    float keep;  // this state's
    float take;  // the other's
  };
  // *this += from, a state over other rows; the larger maximum is the new one.
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

// The same, and over how many rows.
struct RowSums : SoftmaxSums {
  RowSums() : SoftmaxSums(Empty()) {}
  RowSums(const SoftmaxSums& sums, int64_t count) : SoftmaxSums(sums), count(count) {}

  int64_t count = 0;
};

}  // namespace spillway
