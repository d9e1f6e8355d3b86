#pragma once

#include "gpu/kernels/bin_sums.cuh"
#include "gpu/kernels/shared_rows.cuh"
#include "host/core/sample_limit.h"
#include "host/core/tail_plan.h"

// Computes the heavy threshold, the tail's strata and the pilots' thresholds from one histogram.
namespace spillway::cuda {

// The heavy set, if it is chosen by count. REQUIRES: state.rank_variance is set.
__device__ inline HeavySet HeavySetByCount(const AttendShape& shape, const UnitRequest& u) {
  int64_t wanted = u.heavy_count;
  if (u.adaptive_heavy && u.knows_rank_error) {
    for (int h = 0; h < shape.group; ++h) {
      wanted = max(wanted, AdaptiveHeavyCount(u.state->rank_variance[h]));
    }
  }
  return HeavySet::Of(wanted, u.adaptive_heavy, ScoredStrays(shape, u), u.terms.row_count_max,
                      u.sink, u.window);
}

// Where a unit's bins are cut, in shared memory.
struct TailCut {
  int strata;
  uint16_t lowest_bin[kTailStrataMax];  // of each stratum
  int64_t stratum_count[kTailStrataMax];
  int64_t heavy;      // tokens
  int64_t skip;       // tokens of the heavy bin that are not heavy
  int64_t tail;       // tokens
  int64_t rows_left;  // rows that row_count_max leaves for the tail
};

// Fills `cut`: finds where the strata end. One warp; every lane computes the same, but for its own
// edge.
__device__ inline void CutTail(const AttendShape& shape, const UnitRequest& u, const HeavySet& set,
                               const uint32_t* above, int heavy_bin, TailCut& cut) {
  const int bins = shape.bin_count;
  const int64_t all = above[0];
  int64_t heavy = 0;  // heavy tokens in the histogram; none by mass
  int64_t skip = 0;
  if (!u.by_mass) {
    const int64_t higher = heavy_bin + 1 < bins ? above[heavy_bin + 1] : 0;
    const int64_t take = min(set.count() - higher, above[heavy_bin] - higher);
    heavy = higher + take;
    skip = above[heavy_bin] - heavy;
  }
  const int64_t heavy_total = u.by_mass ? static_cast<int64_t>(u.state->heavy_count) : heavy;
  const int64_t tail = all - heavy;
  const auto tail_at = [&](int bin) -> int64_t {
    return bin > heavy_bin ? 0 : int64_t{above[bin]} - heavy;
  };

  const TailTerms& terms = u.terms;
  const int64_t rows_left = TailRowsLeft(terms.row_count_max, u.sink, u.window, heavy_total);
  int strata = 0;
  const auto add = [&](int stratum, int lowest, int64_t count) {
    if (threadIdx.x != 0) return;
    cut.lowest_bin[stratum] = static_cast<uint16_t>(lowest);
    cut.stratum_count[stratum] = count;
  };
  if (tail > 0 && terms.tail == Tail::kStratified) {
    const int64_t k = max(int64_t{1}, heavy_total - set.strays);
    // Lane i finds where edge i falls.
    const int own_edge = min(static_cast<int>(threadIdx.x), kStratumEdgeCount - 1);
    const int own_bin = LastBinReaching(bins, StratumEdge(k, own_edge), tail_at);
    const int64_t own_reached = own_bin < 0 ? 0 : tail_at(own_bin);
    const auto edge_bin = [&](int edge) -> EdgeBin {
      return {__shfl_sync(kFullWarp, own_bin, edge), __shfl_sync(kFullWarp, own_reached, edge)};
    };
    strata = CutStrata(tail, k, edge_bin, add);
  }
  if (tail > 0 && (terms.tail == Tail::kUniform || (strata > 0 && !StrataFit(strata, rows_left)))) {
    strata = 1;
    add(0, 0, tail);
  }
  if (threadIdx.x != 0) return;
  cut.strata = strata;
  cut.heavy = heavy_total;
  cut.skip = skip;
  cut.tail = tail;
  cut.rows_left = rows_left;
}

// Stores the cut and the pilots' thresholds in UnitState, for the kernels that follow. One warp.
__device__ inline void BeginTail(const UnitRequest& u, const TailCut& cut, int heavy_bin) {
  UnitState& state = *u.state;
  const int strata = cut.strata;
  const int64_t rows_left = cut.rows_left;
  // Heavy tokens and those of the heavy bin must pass the filter.
  int near_bin = min(heavy_bin, INT16_MAX);
  for (int h = threadIdx.x; h < strata; h += 32) {
    const int64_t count = cut.stratum_count[h];
    // A coded unit has no pilot.
    const int64_t pilot = u.coded() ? 0 : PilotCount(u.terms.pilot_count, rows_left, strata, count);
    const uint64_t threshold = rows_left != 0 ? SampleThreshold(pilot, count) : 0;
    const uint16_t limit = HashLimit(u.order, threshold);
    if (limit > 0) near_bin = min(near_bin, int{cut.lowest_bin[h]});
    state.stratum_count[h] = count;
    state.drawn_threshold[h] = 0;
    state.budget[h] = pilot;
    state.threshold[h] = threshold;
    state.limit_of_class[h] = limit;
    state.lowest_bin[h] = cut.lowest_bin[h];
    state.drawn[h] = 0;
    for (auto& of_phase : state.stratum_drawn) of_phase[h] = 0;
  }
  near_bin = __reduce_min_sync(kFullWarp, near_bin);
  if (threadIdx.x != 0) return;
  state.heavy_skip = cut.skip;
  state.heavy_from = 0;
  state.heavy_count = static_cast<unsigned long long>(cut.heavy);
  state.strata = strata;
  state.tail_count = cut.tail;
  state.rows_left = rows_left;
  state.limited = strata > 0 && rows_left == 0;
  state.drawing = strata > 0 && rows_left > 0;
  state.list_count = 0;
  state.shared_count = 0;
  state.near_bin = near_bin;
  state.limit_of_class[kClassTie] = state.limit_of_class[kClassHeavy] = kSampleLimitAll;
  state.limit_of_class[kClassNever] = 0;
}

// One block per unit. Shared memory: above [bin_count].
__global__ void __launch_bounds__(kCutThreads, 1)
    CutKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint32_t above[];  // tokens of a bin and above
  __shared__ int heavy_bin;
  __shared__ TailCut cut;
  __shared__ HeavySet heavy_set;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.x, u);
  if (!u.by_mass) NoteMoment(u.result, kCutBegins);
  const int bins = shape.bin_count;
  for (int i = threadIdx.x; i < bins; i += blockDim.x) above[i] = u.histogram[i];
  ClearSharedRows(u.shared, static_cast<int>(blockIdx.x));
  // If it is known, RankTotalsKernel has set it.
  if (!u.knows_rank_error && threadIdx.x < shape.group) u.state->rank_variance[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    heavy_set = u.by_mass ? u.state->heavy_set : HeavySetByCount(shape, u);
    u.state->heavy_set = heavy_set;
    // By count, the loop below finds the bin. If it finds none, this is the bin: the highest if no
    // token is heavy (all of its tokens are skipped), 0 if all are.
    heavy_bin = u.by_mass ? bins : heavy_set.count() == 0 ? bins - 1 : 0;
  }
  SuffixSums(above, bins);

  if (!u.by_mass) {
    const int64_t heavy = heavy_set.count();
    for (int b = threadIdx.x; b < bins; b += blockDim.x) {
      const int64_t next = b + 1 < bins ? above[b + 1] : 0;
      if (above[b] >= heavy && next < heavy) heavy_bin = b;
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) CutTail(shape, u, heavy_set, above, heavy_bin, cut);
  __syncthreads();
  const auto class_below = [&](int bin) {
    return cut.strata == 0 ? kClassNever : StratumOf(cut.lowest_bin, bin);
  };
  if (threadIdx.x < 32) {
    BeginTail(u, cut, heavy_bin);
    if (threadIdx.x == 0) {
      u.state->tie_class = heavy_bin < bins ? class_below(heavy_bin) : kClassNever;
    }
    return;
  }
  for (int b = threadIdx.x - 32; b < bins + 2; b += kCutThreads - 32) {
    const int c = b == bins        ? kClassNever
                  : b == bins + 1  ? kClassHeavy
                  : b < heavy_bin  ? class_below(b)
                  : b == heavy_bin ? kClassTie
                                   : kClassHeavy;
    u.class_of_bin[b] = static_cast<uint8_t>(c);
  }
}

}  // namespace spillway::cuda
