#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "host/core/host_device.h"

namespace spillway {

// One stratum of the tail, for one query head.
struct NeymanStratum {
  int64_t token_count = 0;  // n_h
  int64_t floor = 0;        // rows drawn already, in [0, n_h]
  double deviation = 0;     // T_h = sqrt(Tr Cov[x (v - o)]), inflated
};

// Rows per stratum so that sum n_h^2 T_h^2 (1/b_h - 1/n_h) <= variance at the
// least total, floor_h <= b_h <= n_h: b_h proportional to n_h T_h over the
// strata that no floor or cap holds (Neyman 1934, with the finite-population
// correction). variance <= 0 takes every stratum with a deviation whole.
// allotted has a place per stratum; at most kTailStrataMax strata.
SPILLWAY_HOST_DEVICE inline void NeymanAllot(std::span<const NeymanStratum> strata, double variance,
                                             std::span<int64_t> allotted) {
  const size_t count = strata.size();
  uint64_t fixed = 0;      // a bit per stratum
  double left = variance;  // what the free strata may still spend
  const auto is_fixed = [&](size_t h) { return (fixed >> h & 1) != 0; };
  const auto fix = [&](size_t h, int64_t rows) {
    const NeymanStratum& s = strata[h];
    fixed |= uint64_t{1} << h;
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
      if (is_fixed(h)) continue;
      const double n = static_cast<double>(strata[h].token_count);
      weight += n * strata[h].deviation;
      residue += n * strata[h].deviation * strata[h].deviation;
    }
    if (weight == 0) return;
    const double share = weight / (left + residue);
    const auto wanted = [&](size_t h) {
      return share * static_cast<double>(strata[h].token_count) * strata[h].deviation;
    };
    const bool whole = !(left > 0);
    // Caps before floors: a capped stratum spends nothing, so the floors that
    // follow are judged by what is truly left.
    bool changed = false;
    for (size_t h = 0; h < count; ++h) {
      if (is_fixed(h)) continue;
      if (whole || wanted(h) >= static_cast<double>(strata[h].token_count)) {
        fix(h, strata[h].token_count);
        changed = true;
      }
    }
    if (changed) continue;
    for (size_t h = 0; h < count; ++h) {
      if (!is_fixed(h) && wanted(h) <= static_cast<double>(strata[h].floor)) {
        allotted[h] = -1;
        changed = true;
      }
    }
    if (changed) {
      for (size_t h = 0; h < count; ++h) {
        if (!is_fixed(h) && allotted[h] == -1) fix(h, strata[h].floor);
      }
      continue;
    }
    for (size_t h = 0; h < count; ++h) {
      if (is_fixed(h)) continue;
      const int64_t rows = static_cast<int64_t>(::ceil(wanted(h)));
      const int64_t low = rows < strata[h].floor ? strata[h].floor : rows;
      allotted[h] = low > strata[h].token_count ? strata[h].token_count : low;
    }
    return;
  }
}

}  // namespace spillway
