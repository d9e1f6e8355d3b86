#pragma once

#include <cstdint>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/reference/ranking.h"

namespace spillway::reference {

// The index of the closed pages of one KV head, computed in fp64 by the rules of
// host/core/page_index.h. kv must have at least 1,024 tokens.
struct PageIndex {
  static constexpr int64_t kPageTokens = 128;

  std::vector<std::vector<double>> centres;        // [page][d], bf16 numbers
  std::vector<double> radii;                       // ||k - c||, per token of a closed page
  std::vector<bool> strays;                        // likewise
  std::vector<std::vector<double>> value_centres;  // [page][d]
  std::vector<double> distances;                   // ||v - value centre||, per token
  // round(8 log2(distance / reference)), likewise. A range, if fp32 may round either way.
  std::vector<BinRange> exponents;
  std::vector<int> lifts;        // [page]
  std::vector<BinRange> levels;  // [page], the sum of the norm bytes
  double median_radius = 0;
  std::vector<double> value_centre;  // the first one
  double value_reference = 0;
  double value_unit = 0;
  int value_floor = 0;
  // The smallest distances, as fractions, to where the index would change: of a radius to where the
  // centre or a stray would be another, and of the floor's root mean square and the exponents of
  // lifts to a rounding border.
  double margin = 0;

  static PageIndex Of(const KeyValues& kv, bool raw_keys = false);

  int64_t closed_token_count() const { return static_cast<int64_t>(radii.size()); }
  const std::vector<double>& CentreOf(int64_t token) const { return centres[token / kPageTokens]; }
  // A token's key minus the centre of its page.
  std::vector<double> Centred(const KeyValues& kv, int64_t token) const;
  // What the norm byte of a token that is no stray says.
  BinRange Norm(int64_t token) const;
  // The bins of a score times the value's distance, in 1 to 4094; 4095 for a stray. visible: tokens
  // that the query sees; 0: all.
  BinRange Weigh(BinRange bins, int64_t token, int64_t visible = 0) const;
};

// The end of the scored tokens [sink, end) if n tokens are visible: before the window and before
// the open page.
int64_t ScoredEndByPages(int64_t n, int64_t window);

}  // namespace spillway::reference
