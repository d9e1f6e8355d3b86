#include "host/core/neyman.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace spillway {

void NeymanAllot(std::span<const NeymanStratum> strata, double variance,
                 std::span<int64_t> allotted) {
  const size_t count = strata.size();
  std::vector<bool> fixed(count, false);
  double left = variance;  // what the free strata may still spend
  const auto fix = [&](size_t h, int64_t rows) {
    const NeymanStratum& s = strata[h];
    fixed[h] = true;
    allotted[h] = rows;
    if (rows == s.token_count || s.deviation == 0) return;
    const double n = static_cast<double>(s.token_count);
    const double spread = n * s.deviation;
    // A floor of 0 with a deviation can never meet a finite variance; the
    // caller floors at the pilot.
    left -= spread * spread * (1 / static_cast<double>(rows) - 1 / n);
  };
  for (size_t h = 0; h < count; ++h) {
    if (strata[h].deviation == 0 || strata[h].token_count == strata[h].floor) {
      fix(h, strata[h].floor);
    }
  }
  for (;;) {
    double weight = 0;   // sum n_h T_h
    double residue = 0;  // sum n_h T_h^2
    for (size_t h = 0; h < count; ++h) {
      if (fixed[h]) continue;
      const double n = static_cast<double>(strata[h].token_count);
      weight += n * strata[h].deviation;
      residue += n * strata[h].deviation * strata[h].deviation;
    }
    if (weight == 0) return;
    const auto wanted = [&](size_t h) {
      return weight / (left + residue) * static_cast<double>(strata[h].token_count) *
             strata[h].deviation;
    };
    const bool whole = !(left > 0);
    // Caps before floors: a capped stratum spends nothing, so the floors that
    // follow are judged by what is truly left.
    bool changed = false;
    for (size_t h = 0; h < count; ++h) {
      if (fixed[h]) continue;
      if (whole || wanted(h) >= static_cast<double>(strata[h].token_count)) {
        fix(h, strata[h].token_count);
        changed = true;
      }
    }
    if (changed) continue;
    for (size_t h = 0; h < count; ++h) {
      if (!fixed[h] && wanted(h) <= static_cast<double>(strata[h].floor)) {
        allotted[h] = -1;
        changed = true;
      }
    }
    if (changed) {
      for (size_t h = 0; h < count; ++h) {
        if (!fixed[h] && allotted[h] == -1) fix(h, strata[h].floor);
      }
      continue;
    }
    for (size_t h = 0; h < count; ++h) {
      if (fixed[h]) continue;
      allotted[h] = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(wanted(h))), strata[h].floor,
                                        strata[h].token_count);
    }
    return;
  }
}

}  // namespace spillway
