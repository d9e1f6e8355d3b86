#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "host/base/host_device.h"

namespace spillway {

// Bins of a logit-like score: bits 30..19 of a non-negative fp32 value, so sixteen bins per octave.
// The integer scores of `hamming` are used as bins directly.
inline constexpr int kScoreBinCount = 4096;
inline constexpr int kScoreBinShift = 19;
// Two values above all bins of scores. kHeavyBin marks a heavy token. kNoBin marks a token without
// a score (sink or window).
inline constexpr uint16_t kHeavyBin = 0xFFFF;
inline constexpr uint16_t kNoBin = 0xFFFE;
// The bin of tokens that a first selection did not find, and of strays in the bins of single query
// heads. No estimated score falls into it, and its mass is practically 0.
inline constexpr uint16_t kNotFoundBin = 0;

// The heavy tokens are all tokens of bins above `bin`, and the `take` most recent tokens of `bin`.
struct HeavyThreshold {
  int bin = 0;
  int64_t take = 0;
};

// Selects exactly `count` tokens, or all if there are fewer. counts: tokens per bin.
HeavyThreshold HeavyByCount(std::span<const uint32_t> counts, int64_t count);

// The centre of a logit-like bin: the mass of each token of the bin.
SPILLWAY_HOST_DEVICE inline double BinCentre(int bin) {
  const uint32_t bits =
      (static_cast<uint32_t>(bin) << kScoreBinShift) | (uint32_t{1} << (kScoreBinShift - 1));
  return std::bit_cast<float>(bits);
}

// Selects the fewest tokens whose mass is at least the share `mass` of the total mass, but at least
// `floor` and at most `ceiling` tokens (or all, if there are fewer). Each token counts with its
// bin's centre, which is within 1/32 of its score (Twilight's top-p on a histogram, arXiv
// 2502.02770).
HeavyThreshold HeavyByMass(std::span<const uint32_t> counts, double mass, int64_t floor,
                           int64_t ceiling);
// The same, given only the bins that have tokens, in ascending order, and their counts.
SPILLWAY_HOST_DEVICE inline HeavyThreshold HeavyByMass(std::span<const uint16_t> bins,
                                                       std::span<const uint32_t> counts,
                                                       double mass, int64_t floor,
                                                       int64_t ceiling) {
  if (bins.empty()) return {0, 0};
  double total = 0;
  for (size_t i = 0; i < bins.size(); ++i) total += counts[i] * BinCentre(bins[i]);
  const double wanted = mass * total;
  double reached = 0;
  int64_t above = 0;
  for (size_t i = bins.size(); i-- > 0;) {
    const double each = BinCentre(bins[i]);
    const double here = counts[i] * each;
    if (reached + here >= wanted || above + counts[i] >= ceiling || i == 0) {
      const double need = ::ceil((wanted - reached) / each);
      const double most = static_cast<double>(counts[i]);
      int64_t take = static_cast<int64_t>(need < 0 ? 0 : need > most ? most : need);
      if (above + take < floor) {
        // The heavy set must grow to `floor` tokens: its threshold is at this bin or below.
        int64_t left = floor - above;
        for (;; left -= counts[i--]) {
          if (left <= counts[i]) return {bins[i], left};
          if (i == 0) return {bins[0], counts[0]};
        }
      }
      return {bins[i], take < ceiling - above ? take : ceiling - above};
    }
    reached += here;
    above += counts[i];
  }
  return {bins[0], counts[0]};
}

// The largest bin in [0, bin_count) with at(bin) >= wanted, or -1. REQUIRES: at() is
// non-increasing.
template <typename At>
SPILLWAY_HOST_DEVICE inline int LastBinReaching(int bin_count, int64_t wanted, At at) {
  int low = -1, high = bin_count;  // at(low) reaches, at(high) does not
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (at(middle) >= wanted ? low : high) = middle;
  }
  return low;
}

// A tail that is cut into strata by descending score; see tail_plan.h.
struct Strata {
  std::vector<uint8_t> of_bin;       // stratum (0-based) per bin
  std::vector<uint16_t> lowest_bin;  // per stratum, descending to 0
  std::vector<int64_t> counts;       // n_h per stratum

  int size() const { return static_cast<int>(counts.size()); }
};

// counts: tail tokens per bin, without the heavy tokens; at least one token. heavy_count >= 1
// determines the first edge.
Strata CutStrata(std::span<const uint32_t> counts, int64_t heavy_count);
// The whole tail as one stratum.
Strata OneStratum(size_t bin_count, int64_t token_count);

}  // namespace spillway
