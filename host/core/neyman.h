#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "host/base/host_device.h"

namespace spillway {

// One stratum of the tail, for one query head.
struct NeymanStratum {
  int64_t token_count = 0;  // n_h
  int64_t floor = 0;        // rows drawn already, in [0, n_h]
  double deviation = 0;     // T_h = sqrt(Tr Cov[x (v - o)]), inflated
};

// The sums over strata that an allotment needs.
struct NeymanSums {
  double spent = 0;    // variance of the strata at their floor or cap
  double weight = 0;   // sum of n_h T_h over the others
  double residue = 0;  // sum of n_h T_h^2 over the others
};

// A way to go through strata [0, count): here sequentially. Kernels use one lane per stratum.
struct StrataInTurn {
  int count;

  // Calls f(h) for each stratum h.
  template <typename F>
  SPILLWAY_HOST_DEVICE void ForEach(F f) const {
    for (int h = 0; h < count; ++h) f(h);
  }
  // Returns the sum of f(h) over all strata h; f returns NeymanSums.
  template <typename F>
  SPILLWAY_HOST_DEVICE NeymanSums Sum(F f) const {
    NeymanSums sums;
    for (int h = 0; h < count; ++h) {
      const NeymanSums own = f(h);
      sums.spent += own.spent;
      sums.weight += own.weight;
      sums.residue += own.residue;
    }
    return sums;
  }
  // Whether f(h) is true for at least one stratum. Calls f for all of them.
  template <typename F>
  SPILLWAY_HOST_DEVICE bool Any(F f) const {
    bool any = false;
    for (int h = 0; h < count; ++h) any |= f(h);
    return any;
  }
};

// Computes the rows b_h per stratum with the smallest total for which
//   sum n_h^2 T_h^2 (1/b_h - 1/n_h) <= variance, floor_h <= b_h <= n_h.
// Over the strata that are not at their floor or cap, b_h is proportional to n_h T_h (Neyman 1934,
// with the finite-population correction). If variance is 0 or less, every stratum with a deviation
// is taken whole. allotted has one entry per stratum. A stratum with a deviation needs a floor of
// at least 1, because 0 rows have infinite variance; the caller passes the rows of the pilot as
// floors.
template <typename Walk>
SPILLWAY_HOST_DEVICE inline void NeymanAllot(const Walk& walk, const NeymanStratum* strata,
                                             double variance, int64_t* allotted) {
  constexpr int64_t kFree = -1;  // not at its floor or cap
  const auto count = [&](int h) { return static_cast<double>(strata[h].token_count); };
  walk.ForEach([&](int h) {
    const NeymanStratum& s = strata[h];
    allotted[h] = s.deviation == 0 || s.token_count == s.floor ? s.floor : kFree;
  });
  for (;;) {
    const NeymanSums sums = walk.Sum([&](int h) -> NeymanSums {
      const NeymanStratum& s = strata[h];
      const double spread = count(h) * s.deviation;
      if (allotted[h] == kFree) return {0, spread, spread * s.deviation};
      if (allotted[h] == s.token_count || s.deviation == 0) return {};
      return {spread * spread * (1 / static_cast<double>(allotted[h]) - 1 / count(h)), 0, 0};
    });
    if (sums.weight == 0) return;
    const double left = variance - sums.spent;  // for the free strata
    const double share = sums.weight / (left + sums.residue);
    const auto wanted = [&](int h) { return share * count(h) * strata[h].deviation; };
    // Caps before floors: a stratum that is taken whole adds no variance. So floors are compared
    // with the variance that is really left.
    if (walk.Any([&](int h) {
          if (allotted[h] != kFree || (left > 0 && wanted(h) < count(h))) return false;
          allotted[h] = strata[h].token_count;
          return true;
        })) {
      continue;
    }
    if (walk.Any([&](int h) {
          if (allotted[h] != kFree || wanted(h) > static_cast<double>(strata[h].floor))
            return false;
          allotted[h] = strata[h].floor;
          return true;
        })) {
      continue;
    }
    walk.ForEach([&](int h) {
      if (allotted[h] != kFree) return;
      const int64_t rows = static_cast<int64_t>(::ceil(wanted(h)));
      const int64_t low = rows < strata[h].floor ? strata[h].floor : rows;
      allotted[h] = low > strata[h].token_count ? strata[h].token_count : low;
    });
    return;
  }
}

// The same, sequentially. Both spans have one entry per stratum.
inline void NeymanAllot(std::span<const NeymanStratum> strata, double variance,
                        std::span<int64_t> allotted) {
  NeymanAllot(StrataInTurn{static_cast<int>(strata.size())}, strata.data(), variance,
              allotted.data());
}

}  // namespace spillway
