#pragma once

#include <cstdint>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/reference/ranking.h"

namespace spillway::reference {

// What the index keeps of the closed pages of one KV head (host/core/page_index.h),
// by the rules, in loops of fp64. kv has at least 1,024 tokens.
struct PageIndex {
  static constexpr int64_t kPageTokens = 128;

  std::vector<std::vector<double>> centres;  // [page][d], bf16 numbers
  std::vector<double> radii;                 // ||k - c||, of the tokens of closed pages
  std::vector<bool> strays;                  // likewise
  std::vector<double> distances;             // ||v - value_centre||, likewise
  // round(8 log2(distance / reference)), likewise: a range where fp32 may round
  // either way.
  std::vector<BinRange> exponents;
  double median_radius = 0;
  std::vector<double> value_centre;
  double value_reference = 0;
  double value_unit = 0;
  int value_floor = 0;
  // The least distance of a radius to where another centre or another stray would
  // follow, and of the floor's root mean square to where it rounds otherwise, as a
  // fraction.
  double margin = 0;

  static PageIndex Of(const KeyValues& kv, bool raw_keys = false);

  int64_t closed_token_count() const { return static_cast<int64_t>(radii.size()); }
  const std::vector<double>& CentreOf(int64_t token) const { return centres[token / kPageTokens]; }
  // k less its page's centre.
  std::vector<double> Centred(const KeyValues& kv, int64_t token) const;
  // A score's bins times the value's distance, in 1 to 4094; 4095 of a stray.
  BinRange Weigh(BinRange bins, int64_t token) const;
};

// Where the scored tokens [sink, end) of n visible ones end: before the window
// and before the open page.
int64_t ScoredEndByPages(int64_t n, int64_t window);

}  // namespace spillway::reference
