#pragma once

#include <cstdint>

#include "host/base/host_device.h"
#include "host/base/limits.h"
#include "host/core/page_index.h"
#include "host/core/rank_error.h"

// The plan of a tail's sample: how many rows row_count_max leaves for the tail, where its strata
// end, how large their pilots are, and how a limited number of rows is shared. Host and device call
// these functions, so that both choose the same rows.
namespace spillway {

// Number of rows that row_count_max (0: no limit) leaves for the tail. 0 if sink, window and heavy
// set reach the limit, which a heavy set by fraction or mass may do.
SPILLWAY_HOST_DEVICE inline int64_t TailRowsLeft(int64_t row_count_max, int64_t sink,
                                                 int64_t window, int64_t heavy) {
  if (row_count_max == 0) return INT64_MAX;
  const int64_t left = row_count_max - sink - window - heavy;
  return left > 0 ? left : 0;
}

// The heavy set of a unit. If `adaptive`, the wanted count comes from the error of the ranks. If
// row_count_max is set too, at most half of the rows left after sink, window and strays (but
// kAdaptiveHeavyMin if they fit) are heavy by rank, so that rows remain for the tail.
struct HeavySet {
  int64_t ranked;   // tokens that are heavy by rank, without strays
  int64_t strays;   // strays that are read
  bool strays_fit;  // no stray is left out

  SPILLWAY_HOST_DEVICE int64_t count() const { return ranked + strays; }

  // scored_strays: number of strays among the scored tokens.
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

// Edges between strata: edge i is where the rank passes heavy_count * 2^(i + 1). The tokens beyond
// the last edge are one stratum.
inline constexpr int kStratumEdgeCount = 31;

// Number of tail tokens up to an edge: the edge's bin and the bins above it have at least this
// many.
SPILLWAY_HOST_DEVICE inline int64_t StratumEdge(int64_t heavy_count, int edge) {
  return (heavy_count << (edge + 1)) - heavy_count;
}

// The bin of an edge. bin: the highest bin for which the tail tokens of it and of the bins above
// number at least StratumEdge(); -1 if there is none. reached: the number of these tokens.
struct EdgeBin {
  int bin = -1;
  int64_t reached = 0;
};

// Cuts a tail of tail_count > 0 tokens into strata by rank. Edges are at bin borders, where the
// rank passes 2k, 4k, ... with k = heavy_count >= 1. As soon as less than a tenth of the tail
// remains, the remainder is the last stratum. edge_bin(i) returns the EdgeBin of edge i.
// add(stratum, lowest_bin, token_count) is called for the strata in order. Returns their number, at
// most kTailStrataMax.
template <typename EdgeBinOf, typename Add>
SPILLWAY_HOST_DEVICE inline int CutStrata(int64_t tail_count, int64_t heavy_count,
                                          EdgeBinOf edge_bin, Add add) {
  static_assert(kStratumEdgeCount < kTailStrataMax);
  int strata = 0;
  int64_t closed = 0;  // tokens of the strata already added
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

// Whether the limit leaves enough rows for several strata; otherwise the tail is sampled as one
// stratum.
SPILLWAY_HOST_DEVICE inline bool StrataFit(int strata, int64_t rows_left) {
  return int64_t{strata} * 2 * kStratumRowsMin <= rows_left;
}

// Number of rows of a stratum's pilot: pilot_count, or less if the limit leaves less. Small strata
// are taken whole.
SPILLWAY_HOST_DEVICE inline int64_t PilotCount(int64_t pilot_count, int64_t rows_left, int strata,
                                               int64_t token_count) {
  // The same as pilot_count <= rows_left / (2 strata), but without a division.
  const bool enough = pilot_count <= INT32_MAX && pilot_count * 2 * strata <= rows_left;
  const int64_t share = enough ? pilot_count : rows_left / (2 * strata);
  const int64_t each = pilot_count < share ? pilot_count : share;
  return token_count > 2 * each ? each : token_count;
}

// Shares the rows that the limit leaves if the budgets need more. The rows already drawn are spent;
// the rest is shared in proportion to the further rows that each budget needs.
struct RowShare {
  double share;

  // drawn, budget: sums over all strata of the rows drawn and of the budgets.
  SPILLWAY_HOST_DEVICE static RowShare Of(int64_t rows_left, int64_t drawn, int64_t budget) {
    const int64_t wanted = budget - drawn;
    return {static_cast<double>(rows_left - drawn) / static_cast<double>(wanted > 1 ? wanted : 1)};
  }
  // The reduced budget of one stratum.
  SPILLWAY_HOST_DEVICE int64_t Cut(int64_t drawn, int64_t budget) const {
    return drawn + static_cast<int64_t>(share * static_cast<double>(budget - drawn));
  }
};

}  // namespace spillway
