#pragma once

#include "gpu/kernels/filter.cuh"
#include "host/core/tail_draw.h"

// Settles a phase's draw: how many rows of each class it has, and where they go in the list.
namespace spillway::cuda {

inline constexpr int kResolveThreads = 1024;
// If the GPU lacks few rows in phase 0, they are not gathered: folding them from host memory is as
// fast. At most this many of a unit, and so many of all units of a wave.
inline constexpr int kDirectRowsMax = 512;
inline constexpr int kDirectRowsOfWave = 2048;

// Where the tokens of the heavy bin (the ties) become heavy: all except the first heavy_skip are.
struct TieSplit {
  int64_t heavy_from;  // the first heavy token among them
  int64_t segment;     // of heavy_from
  uint32_t heavy;      // heavy ties of this segment
  uint32_t drawn;      // drawn ones among its other ties
  uint32_t missed;     // of both, those that the GPU does not hold
};

// Fills tie_split; the first `skip` ties are not heavy. All threads of the block.
__device__ inline void SplitTies(const UnitRequest& u, const SampleRule& rule, int64_t skip,
                                 TieSplit& tie_split) {
  __shared__ int64_t warp_ties[kResolveThreads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    // Until the segment is found: all ties are heavy (skip is 0) or none.
    tie_split = {skip == 0 ? 0 : u.n, skip == 0 ? -1 : u.segments(), 0, 0, 0};
  }
  if (skip == 0) {
    __syncthreads();
    return;
  }
  int64_t before = 0;  // ties of earlier rounds
  for (int64_t base = 0; base < u.segments(); base += kResolveThreads) {
    const int64_t segment = base + threadIdx.x;
    const int64_t ties = segment < u.segments() ? u.segment_ties[segment].all : 0;
    int64_t scan = WarpScan(ties);
    if (lane == 31) warp_ties[warp] = scan;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < kResolveThreads / 32; ++w) {
      if (w == warp) scan += before + total;
      total += warp_ties[w];
    }
    before += total;
    // The warp with the segment in which the first `skip` ties end searches it.
    const unsigned found = __ballot_sync(kFullWarp, scan > skip && scan - ties <= skip);
    if (found != 0) {
      const int holder = __ffs(found) - 1;
      const int64_t first = __shfl_sync(kFullWarp, scan - ties, holder);
      const int64_t last = __shfl_sync(kFullWarp, scan, holder);
      const int64_t its_segment = __shfl_sync(kFullWarp, segment, holder);
      const uint32_t* filtered = u.filtered + its_segment * kSegmentTokens;
      const uint32_t count = u.segment_counts[its_segment];
      int64_t rank = first;
      uint32_t drawn = 0;
      uint32_t missed = u.segment_ties[its_segment].all_missed;  // of the drawn and heavy ties
      constexpr int kAhead = 8;
      bool turned = false;
      for (uint32_t base = 0; base < count && !turned; base += 32 * kAhead) {
        uint32_t packed[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const uint32_t i = base + j * 32 + lane;
          packed[j] = i < count ? filtered[i] : FilteredToken::Pack(0, kClassNever, true);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (turned) break;
          const FilteredToken passed(packed[j]);
          const auto token = static_cast<uint32_t>(its_segment * kSegmentTokens + passed.slot);
          const bool tie = passed.c == kClassTie;
          const unsigned mask = __ballot_sync(kFullWarp, tie);
          const int64_t mine = rank + __popc(mask & ((1u << lane) - 1));
          const bool before_split = tie && mine < skip;
          const bool hit =
              before_split && rule.tie_class < rule.strata && Drawn(rule, rule.tie_class, token);
          drawn += __popc(__ballot_sync(kFullWarp, hit));
          missed -= __popc(__ballot_sync(kFullWarp, before_split && !hit && !passed.resident));
          const unsigned turning = __ballot_sync(kFullWarp, tie && mine == skip);
          rank += __popc(mask);
          if (turning == 0) continue;
          turned = true;
          const uint32_t from = __shfl_sync(kFullWarp, token, __ffs(turning) - 1);
          if (lane == 0) {
            tie_split = {from, its_segment, static_cast<uint32_t>(last - skip), drawn, missed};
          }
        }
      }
    }
    __syncthreads();
  }
}

// Replaces segment_table's columns of heavy tokens, strata and missed rows by their sums over the
// segments before; totals: the sums over all segments. counts(column, segment, count): what a cell
// counts. One warp per column; all threads of the block.
template <typename Counts>
__device__ inline void SumColumns(const UnitRequest& u, int strata, Counts counts,
                                  int64_t* totals) {
  constexpr int kCells = 8;  // read by a lane at a time
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < strata + 2; i += blockDim.x / 32) {
    const int column = i <= strata ? i : kMissedColumn;
    uint32_t* cells = u.segment_table + column * u.segments();
    int64_t before = 0;
    for (int64_t base = 0; base < u.segments(); base += 32 * kCells) {
      uint32_t scans[kCells];
#pragma unroll
      for (int j = 0; j < kCells; ++j) {
        const int64_t segment = base + j * 32 + lane;
        scans[j] = segment < u.segments() ? counts(column, segment, cells[segment]) : 0;
      }
#pragma unroll
      for (int j = 0; j < kCells; ++j) {
        const int64_t segment = base + j * 32 + lane;
        const uint32_t scan = WarpScan(scans[j]);
        if (segment < u.segments())
          cells[segment] = static_cast<uint32_t>(before + scan - scans[j]);
        before += __shfl_sync(kFullWarp, scan, 31);
      }
    }
    if (lane == 0) totals[column] = before;
  }
  __syncthreads();
}

// The part of UnitState that settling a draw changes, in shared memory.
struct DrawState : TailDraw {
  int64_t list_count;
  int64_t gathered;  // rows that earlier phases gather
};

// Judges a phase's draw; counts: of the strata.
__device__ inline DrawVerdict Judge(bool coded, int phase, const int64_t* counts, TailDraw& draw) {
  if (!coded) return phase == 0 ? JudgePilot(counts, draw) : JudgeSample(counts, draw);
  if (phase == 0) return DrawVerdict::kTake;
  return phase == 1 ? JudgeFirst(counts, draw) : JudgeSample(counts, draw);
}

// All threads of the block; the caller synchronises.
__device__ inline void LoadDraw(const UnitRequest& u, int phase, DrawState& draw) {
  const UnitState& s = *u.state;
  if (threadIdx.x == 0) {
    draw.strata = s.strata;
    draw.limited = s.limited;
    draw.given_up = false;
    draw.rows_left = s.rows_left;
    draw.list_count = s.list_count;
    draw.gathered = phase == 0 ? 0 : s.gather_first + s.gather_count;
  }
  for (int h = threadIdx.x; h < kTailStrataMax; h += blockDim.x) {
    draw.token_count[h] = s.stratum_count[h];
    draw.drawn[h] = s.drawn[h];
    draw.wanted[h] = h < s.strata ? s.budget[h] : 0;
    draw.drawn_threshold[h] = s.drawn_threshold[h];
    draw.threshold[h] = s.threshold[h];
  }
}

// Writes the list's layout, the splits to fold and what this phase draws to UnitState. All threads.
__device__ inline void LayOut(const UnitRequest& u, int phase, int64_t direct_rows_max,
                              const int64_t* totals, const DrawState& draw) {
  constexpr int kSets = 1 + kTailStrataMax;
  static_assert(kSets <= 64);
  __shared__ int64_t first_of[kSets];
  __shared__ int first_split[kSets + 1];
  __shared__ int64_t split_rows;
  UnitState& s = *u.state;
  const int sets = 1 + draw.strata;
  const int64_t exact = phase == 0 ? u.sink + totals[0] + u.window : 0;
  const auto rows_of = [&](int set) { return set == 0 ? exact : set < sets ? totals[set] : 0; };
  if (threadIdx.x < 32) {
    // Each lane handles the sets 2 * lane and 2 * lane + 1.
    const int set = 2 * static_cast<int>(threadIdx.x);
    const int64_t low = rows_of(set), high = rows_of(set + 1);
    const int64_t after = draw.list_count + WarpScan(low + high);
    const int64_t end = __shfl_sync(kFullWarp, after, 31);
    const auto even =
        static_cast<uint32_t>(end - draw.list_count + kSplitsWanted - 1) / kSplitsWanted;
    const uint32_t rows = max(static_cast<uint32_t>(kSplitRowsMin), (even + 31) / 32 * 32);
    const int low_splits = static_cast<int>((static_cast<uint32_t>(low) + rows - 1) / rows);
    const int high_splits = static_cast<int>((static_cast<uint32_t>(high) + rows - 1) / rows);
    const int splits_after = WarpScan(low_splits + high_splits);
    const int splits = __shfl_sync(kFullWarp, splits_after, 31);
    if (set < sets) {
      first_of[set] = after - high - low;
      first_split[set] = splits_after - high_splits - low_splits;
    }
    if (set + 1 < sets) {
      first_of[set + 1] = after - high;
      first_split[set + 1] = splits_after - high_splits;
    }
    if (threadIdx.x == 0) {
      first_split[sets] = splits;
      split_rows = rows;
      if (phase == 0) s.exact_count = exact;
      s.limited = draw.limited;
      s.list_count = end;
      s.split_count[phase] = splits;
      int64_t missed = totals[kMissedColumn];
      if (phase == 0) missed += MissedSink(u) + MissedWindow(u);
      // The third phase is rare and has few rows, so it has no gather.
      const int64_t direct_rows = u.shared.slots == 0 ? direct_rows_max : 0;
      s.staged = (phase == 1 || (phase == 0 && missed > direct_rows)) &&
                 draw.gathered + missed <= u.staging_rows;
      s.moved_count = missed + (phase == 0 ? 0 : s.moved_count);
      s.gather_first = draw.gathered;
      s.gather_count = s.staged ? missed : 0;
    }
  }
  __syncthreads();
  for (int h = threadIdx.x; h < draw.strata; h += blockDim.x) {
    s.stratum_first[h] = first_of[1 + h];
    s.stratum_drawn[phase][h] = totals[1 + h];
    s.drawn[h] = draw.drawn[h] + totals[1 + h];
    s.threshold[h] = draw.threshold[h];
  }
  for (int set = threadIdx.x / 32; set < sets; set += kResolveThreads / 32) {
    const int64_t rows = set == 0 ? exact : totals[set];
    for (int i = first_split[set] + threadIdx.x % 32; i < first_split[set + 1]; i += 32) {
      const int64_t at = (i - first_split[set]) * split_rows;
      s.splits[phase][i] = {set, static_cast<int32_t>(min(split_rows, rows - at)),
                            first_of[set] + at};
    }
  }
}

// Settles a phase's draw. One block per unit.
__global__ void __launch_bounds__(kResolveThreads)
    ResolveKernel(int phase, int bin_count, const UnitRequest* units) {
  extern __shared__ __align__(16) uint8_t class_of_bin[];
  __shared__ BinTable table;
  __shared__ uint16_t limits[kClassCount];
  __shared__ SampleRule rule;
  __shared__ DrawState draw;
  __shared__ uint32_t warp_columns[kResolveThreads / 32][kSegmentColumns];
  __shared__ int64_t totals[kSegmentColumns];
  __shared__ uint64_t collected[kTailStrataMax];
  __shared__ TieSplit tie_split;
  __shared__ DrawVerdict verdict;
  __shared__ bool collect;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.x, u);
  UnitState& state = *u.state;
  if (phase > 0 && !state.drawing) {
    if (threadIdx.x == 0) {
      state.gather_count = 0;
      state.split_count[phase] = 0;
    }
    return;
  }
  LoadDraw(u, phase, draw);
  LoadRule(u, phase, state.threshold, rule);
  if (threadIdx.x < kTailStrataMax) {
    const uint64_t threshold = draw.threshold[threadIdx.x];
    collected[threadIdx.x] = u.coded() && phase == 1
                                 ? CollectedThreshold(draw.wanted[threadIdx.x], threshold)
                                 : threshold;
  }
  if (phase == 0) {
    SplitTies(u, rule, state.heavy_skip, tie_split);
    if (threadIdx.x == 0) rule.heavy_from = state.heavy_from = tie_split.heavy_from;
    const auto with_ties = [&](int column, int64_t segment, uint32_t count) {
      const SegmentTies ties = u.segment_ties[segment];
      const bool above = segment > tie_split.segment;
      const bool below = segment < tie_split.segment;
      if (column == 0) return count + (above ? ties.all : below ? 0 : tie_split.heavy);
      if (column == 1 + rule.tie_class)
        return count + (below ? ties.drawn : above ? 0 : tie_split.drawn);
      if (column == kMissedColumn) {
        return count + (above ? ties.all_missed : below ? ties.drawn_missed : tie_split.missed);
      }
      return count;
    };
    SumColumns(u, rule.strata, with_ties, totals);
  } else {
    SumColumns(
        u, rule.strata, [](int, int64_t, uint32_t count) { return count; }, totals);
  }
  for (;;) {
    if (threadIdx.x == 0) {
      verdict = Judge(u.coded(), phase, totals + 1, draw);
      collect = false;
      for (int h = 0; h < draw.strata && verdict == DrawVerdict::kDrawAgain; ++h) {
        if (draw.threshold[h] <= collected[h]) continue;
        collected[h] = draw.threshold[h];
        collect = true;
      }
    }
    __syncthreads();
    if (verdict == DrawVerdict::kTake) break;
    if (collect) {
      // Rare: the draw needs tokens that the filter has dropped. Filters all segments again.
      LoadRule(u, phase, collected, rule);
      if (threadIdx.x == 0) state.near_bin = 0;
      for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) {
        const uint2 range = rule.ranges[c];
        limits[c] = range.x <= range.y ? HashLimit(u.order, range.y + uint64_t{1}) : 0;
      }
      __syncthreads();
      LoadBins(u, bin_count, class_of_bin, limits, table);
      __syncthreads();
      for (int64_t segment = 0; segment < u.segments(); ++segment) {
        OwnTokens<kResolveThreads> own;
        own.Load(u, segment);
        FilterSegment(u, rule, table, phase, segment, own);
      }
    }
    LoadRule(u, phase, draw.threshold, rule);
    const int warp = threadIdx.x / 32;
    for (int64_t segment = warp; segment < u.segments(); segment += kResolveThreads / 32) {
      CountSegment(u, rule, phase, segment, warp_columns[warp]);
    }
    __syncthreads();
    SumColumns(
        u, rule.strata, [](int, int64_t, uint32_t count) { return count; }, totals);
  }
  LayOut(u, phase, min(kDirectRowsMax, kDirectRowsOfWave / static_cast<int>(gridDim.x)), totals,
         draw);
}

}  // namespace spillway::cuda
