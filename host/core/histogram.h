#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/device/attend.h"

namespace spillway {

// Bins of a logit-like score: bits 30..19 of a non-negative fp32 value, so
// sixteen bins an octave. Integer scores of `hamming` are their own bins.
inline constexpr int kScoreBinCount = 4096;
inline constexpr int kScoreBinShift = 19;

// The heavy tokens are those of every bin above `bin` and the `take` most
// recent ones of `bin`.
struct HeavyThreshold {
  int bin = 0;
  int64_t take = 0;
};

// Exactly min(count, all) tokens. counts: tokens per bin.
HeavyThreshold HeavyByCount(std::span<const uint32_t> counts, int64_t count);

// The middle of a logit-like bin: what a token of the bin counts for.
double BinCentre(int bin);

// The fewest tokens whose mass reaches `mass` of the total, never fewer than
// floor nor more than ceiling (both capped by what there is). Every token
// weighs its bin's centre, within 1/32 of its own (Twilight's top-p on a
// histogram, arXiv 2502.02770).
HeavyThreshold HeavyByMass(std::span<const uint32_t> counts, double mass, int64_t floor,
                           int64_t ceiling);

// The tail's strata: bins by falling score, cut where the rank passes k, 2k,
// 4k, ... at bin borders, until less than a tenth of the tail remains, which
// is the last stratum.
struct Strata {
  std::vector<uint8_t> of_bin;  // stratum (0-based) per bin
  std::vector<int64_t> counts;  // n_h per stratum
};

// counts: tail tokens per bin, the heavy ones taken out. heavy_count >= 1
// sets the first edge; at most kTailStrataMax strata.
Strata CutStrata(std::span<const uint32_t> counts, int64_t heavy_count);

}  // namespace spillway
