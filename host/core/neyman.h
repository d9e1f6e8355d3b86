#pragma once

#include <cstdint>
#include <span>

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
void NeymanAllot(std::span<const NeymanStratum> strata, double variance,
                 std::span<int64_t> allotted);

}  // namespace spillway
