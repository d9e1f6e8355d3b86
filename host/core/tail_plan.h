#pragma once

#include <cstdint>

#include "host/base/limits.h"
#include "host/core/host_device.h"
#include "host/core/page_index.h"
#include "host/core/rank_error.h"

// Sizes of a tail's parts: what row_count_max leaves for it, where its strata
// end, how large their pilots are, how a limit is shared. Host and device call
// these functions, so that both choose the same rows.
namespace spillway {

// Rows that row_count_max (0: no limit) leaves for the tail. A heavy set by
// fraction or mass may itself reach the limit.
SPILLWAY_HOST_DEVICE inline int64_t TailRowsLeft(int64_t row_count_max, int64_t sink,
                                                 int64_t window, int64_t heavy) {
  if (row_count_max == 0) return INT64_MAX;
  const int64_t left = row_count_max - sink - window - heavy;
  return left > 0 ? left : 0;
}

// The heavy set of a unit. With `adaptive` the count wanted follows from the
// ranks' error; a limit leaves it at most half of what it leaves at all.
struct HeavySet {
  int64_t ranked;   // tokens that are heavy by rank, strays apart
  int64_t strays;   // strays that are read
  bool strays_fit;  // no stray is left out

  SPILLWAY_HOST_DEVICE int64_t count() const { return ranked + strays; }

  // scored_strays: strays among the scored tokens.
  SPILLWAY_HOST_DEVICE static HeavySet Of(int64_t wanted, bool adaptive, int64_t scored_strays,
                                          int64_t row_count_max, int64_t sink, int64_t window) {
    const int64_t left = TailRowsLeft(row_count_max, sink, window, 0);
    int64_t strays = scored_strays < kStrayCountMax ? scored_strays : kStrayCountMax;
    if (strays > left) strays = left;
    const int64_t room = left - strays;
    int64_t ranked = wanted;
    if (adaptive && ranked > room / 2) {
      ranked = room / 2 > kAdaptiveHeavyMin ? room / 2 : kAdaptiveHeavyMin;
      if (ranked > wanted) ranked = wanted;
    }
    if (ranked > room) ranked = room;
    return {ranked, strays, strays == scored_strays};
  }
};

// Edges of strata: edge i lies where rank heavy_count * 2^(i + 1) is passed. A
// tail is shorter than 2^31 tokens, so the last edge is beyond every tail.
inline constexpr int kStratumEdgeCount = 31;

// Tail tokens of the edge's bin and of those above it, at least.
SPILLWAY_HOST_DEVICE inline int64_t StratumEdge(int64_t heavy_count, int edge) {
  return (heavy_count << (edge + 1)) - heavy_count;
}

// Where an edge falls: the highest bin at which the tail's tokens of that bin
// and above number StratumEdge() or more, -1 if they never do; and how many
// they are.
struct EdgeBin {
  int bin = -1;
  int64_t reached = 0;
};

// Cuts a tail of tail_count > 0 tokens into strata by falling rank: at bin
// borders where the rank passes k, 2k, 4k, ... of k = heavy_count >= 1, until
// less than a tenth of the tail remains, which is the last stratum.
// edge_bin(i): an EdgeBin. add(stratum, lowest_bin, token_count) takes the
// strata in order. Returns their number, at most kTailStrataMax.
template <typename EdgeBinOf, typename Add>
SPILLWAY_HOST_DEVICE inline int CutStrata(int64_t tail_count, int64_t heavy_count,
                                          EdgeBinOf edge_bin, Add add) {
  static_assert(kStratumEdgeCount < kTailStrataMax);
  int strata = 0;
  int64_t closed = 0;  // tokens of the strata so far
  bool last = false;
  for (int edge = 0; !last && edge < kStratumEdgeCount;) {
    const EdgeBin at = edge_bin(edge);
    if (at.bin < 0 || at.reached == tail_count) break;
    add(strata, at.bin, at.reached - closed);
    closed = at.reached;
    ++strata;
    last = (tail_count - closed) * 10 < tail_count;
    while (edge < kStratumEdgeCount && StratumEdge(heavy_count, edge) <= closed) ++edge;
  }
  add(strata, 0, tail_count - closed);
  return strata + 1;
}

// Whether a limit leaves room for strata; else the tail is sampled as one.
SPILLWAY_HOST_DEVICE inline bool StrataFit(int strata, int64_t rows_left) {
  return int64_t{strata} * 2 * kStratumRowsMin <= rows_left;
}

// Rows that each stratum's pilot asks for: pilot_count, less where the limit
// leaves less; small strata whole.
SPILLWAY_HOST_DEVICE inline int64_t PilotCount(int64_t pilot_count, int64_t rows_left, int strata,
                                               int64_t token_count) {
  // pilot_count <= rows_left / (2 strata), without the division.
  const bool enough = pilot_count <= INT32_MAX && pilot_count * 2 * strata <= rows_left;
  const int64_t share = enough ? pilot_count : rows_left / (2 * strata);
  const int64_t each = pilot_count < share ? pilot_count : share;
  return token_count > 2 * each ? each : token_count;
}

// Shares what a limit leaves where the budgets ask for more: what the pilot
// drew is spent, the rest goes in proportion to what is asked for beyond it.
struct RowShare {
  double share;

  // Sums over the strata: drawn rows and budgets.
  SPILLWAY_HOST_DEVICE static RowShare Of(int64_t rows_left, int64_t drawn, int64_t budget) {
    const int64_t wanted = budget - drawn;
    return {static_cast<double>(rows_left - drawn) / static_cast<double>(wanted > 1 ? wanted : 1)};
  }
  // A stratum's budget, cut.
  SPILLWAY_HOST_DEVICE int64_t Cut(int64_t drawn, int64_t budget) const {
    return drawn + static_cast<int64_t>(share * static_cast<double>(budget - drawn));
  }
};

}  // namespace spillway
