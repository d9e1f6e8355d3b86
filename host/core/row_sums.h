#pragma once

#include <cmath>
#include <span>

#include "host/core/estimate.h"
#include "host/core/exp.h"

namespace spillway {

// into += from: two sets of sums over disjoint rows, rescaled to the larger
// maximum. The empty state (count 0) is neutral. value and, where kept,
// value_sq are [d]; pass empty spans where there are no moments.
inline void MergeSums(RowSums& into, std::span<float> value, std::span<float> value_sq,
                      const RowSums& from, std::span<const float> from_value,
                      std::span<const float> from_value_sq) {
  if (from.count == 0) return;
  float keep = 0;
  float take = 1;
  if (into.count > 0) {
    const float max = std::fmax(into.max, from.max);
    keep = ExpF32(into.max - max);
    take = ExpF32(from.max - max);
    into.max = max;
  } else {
    into.max = from.max;
  }
  into.sum = into.sum * keep + from.sum * take;
  into.sum_sq = into.sum_sq * keep * keep + from.sum_sq * take * take;
  into.sum_sq_norm = into.sum_sq_norm * keep * keep + from.sum_sq_norm * take * take;
  into.count += from.count;
  for (size_t i = 0; i < value.size(); ++i) value[i] = value[i] * keep + from_value[i] * take;
  for (size_t i = 0; i < value_sq.size(); ++i) {
    value_sq[i] = value_sq[i] * keep * keep + from_value_sq[i] * take * take;
  }
}

}  // namespace spillway
