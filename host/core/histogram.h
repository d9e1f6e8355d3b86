#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "host/core/host_device.h"

namespace spillway {

// Bins of a logit-like score: bits 30..19 of a non-negative fp32 value, so
// sixteen bins an octave. Integer scores of `hamming` are their own bins.
inline constexpr int kScoreBinCount = 4096;
inline constexpr int kScoreBinShift = 19;
// Bins that are no score's, above all of these: of a token that is heavy, and
// of one that has no score (of the sink or the window).
inline constexpr uint16_t kHeavyBin = 0xFFFF;
inline constexpr uint16_t kNoBin = 0xFFFE;
// The bin of tokens that a first selection did not find: no estimate's, and of
// no mass.
inline constexpr uint16_t kNotFoundBin = 0;

// The heavy tokens are those of every bin above `bin` and the `take` most
// recent ones of `bin`.
struct HeavyThreshold {
  int bin = 0;
  int64_t take = 0;
};

// Exactly min(count, all) tokens. counts: tokens per bin.
HeavyThreshold HeavyByCount(std::span<const uint32_t> counts, int64_t count);

// The middle of a logit-like bin: what a token of the bin counts for.
SPILLWAY_HOST_DEVICE inline double BinCentre(int bin) {
  const uint32_t bits =
      (static_cast<uint32_t>(bin) << kScoreBinShift) | (uint32_t{1} << (kScoreBinShift - 1));
  return std::bit_cast<float>(bits);
}

// The fewest tokens whose mass reaches `mass` of the total, never fewer than
// floor nor more than ceiling (both capped by what there is). Every token
// weighs its bin's centre, within 1/32 of its own (Twilight's top-p on a
// histogram, arXiv 2502.02770).
HeavyThreshold HeavyByMass(std::span<const uint32_t> counts, double mass, int64_t floor,
                           int64_t ceiling);
// The same from the bins that hold tokens alone, ascending, and their counts.
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
        // The floor's own threshold lies at this bin or below.
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

// The largest bin of [0, bin_count) with at(bin) >= wanted, or -1; at() does
// not ascend.
template <typename At>
SPILLWAY_HOST_DEVICE inline int LastBinReaching(int bin_count, int64_t wanted, At at) {
  int low = -1, high = bin_count;  // at(low) reaches, at(high) does not
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (at(middle) >= wanted ? low : high) = middle;
  }
  return low;
}

// A tail cut into strata by falling score; see tail_plan.h.
struct Strata {
  std::vector<uint8_t> of_bin;       // stratum (0-based) per bin
  std::vector<uint16_t> lowest_bin;  // per stratum, descending to 0
  std::vector<int64_t> counts;       // n_h per stratum

  int size() const { return static_cast<int>(counts.size()); }
};

// counts: tail tokens per bin, the heavy ones taken out; at least one token.
// heavy_count >= 1 sets the first edge.
Strata CutStrata(std::span<const uint32_t> counts, int64_t heavy_count);
// All of a tail as one stratum.
Strata OneStratum(size_t bin_count, int64_t token_count);

}  // namespace spillway
