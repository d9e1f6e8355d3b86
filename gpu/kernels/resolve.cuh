#pragma once

#include "gpu/kernels/filter.cuh"
#include "gpu/kernels/unit_blocks.cuh"
#include "host/core/tail_draw.h"

// How many rows of which class a phase's filtered tokens come to, and where they go in its list.
// All blocks of a unit find out together, and each knows the same.
namespace spillway::cuda {

// Rows of a unit's pilot that are folded where they lie: fewer than these are
// there as fast as they could be gathered.
inline constexpr int kDirectRowsMax = 512;

// Segments [begin, end) are a block's.
struct OwnSegments {
  int64_t begin;
  int64_t end;

  __device__ static OwnSegments Of(const UnitRequest& u, const UnitBlocks& blocks) {
    const int64_t each = (u.segments() + blocks.count() - 1) / blocks.count();
    const int64_t begin = min(each * blocks.rank(), u.segments());
    return {begin, min(begin + each, u.segments())};
  }
};

// Where ties turn heavy, and what a block's own come to.
struct TieSplit {
  int64_t heavy_from;  // token
  uint32_t heavy;      // heavy ties
  uint32_t drawn;      // of the others, those drawn
  uint32_t missed;     // of both, those that the GPU does not hold
};

// Of the block in whose segments the first `skip` of its ties end. One warp.
__device__ inline TieSplit SplitTies(const UnitRequest& u, const SampleRule& rule,
                                     const OwnSegments& own, int64_t skip) {
  const int lane = threadIdx.x % 32;
  uint32_t heavy = 0, drawn = 0, missed = 0;  // of this lane's segments
  int64_t holder = own.end;                   // that the first `skip` end in
  int64_t rank = 0;                           // ties before it, then before a token of it
  int64_t before = 0;
  for (int64_t base = own.begin; base < own.end; base += 32) {
    const int64_t segment = base + lane;
    const SegmentTies ties = segment < own.end ? u.segment_ties[segment] : SegmentTies{0, 0, 0, 0};
    const int64_t after = before + WarpScan(int64_t{ties.all});
    const bool holds = after > skip && after - ties.all <= skip;
    if (after <= skip) {
      drawn += ties.drawn;
      missed += ties.drawn_missed;
    } else if (!holds) {
      heavy += ties.all;
      missed += ties.all_missed;
    } else {
      heavy += static_cast<uint32_t>(after - skip);
      missed += ties.all_missed;  // less what is found below
    }
    const unsigned found = __ballot_sync(kFullWarp, holds);
    if (found != 0) {
      const int from = __ffs(found) - 1;
      holder = base + from;
      rank = __shfl_sync(kFullWarp, after - ties.all, from);
    }
    before = __shfl_sync(kFullWarp, after, 31);
  }
  TieSplit split = {0, WarpSum(heavy), WarpSum(drawn), WarpSum(missed)};
  if (holder == own.end) return split;
  constexpr int kAhead = 8;
  const uint32_t* filtered = u.filtered + holder * kSegmentTokens;
  const uint32_t count = u.segment_counts[holder];
  for (uint32_t base = 0; base < count; base += 32 * kAhead) {
    uint32_t packed[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t i = base + j * 32 + lane;
      packed[j] = i < count ? filtered[i] : FilteredToken::Pack(0, kClassNever, true);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const FilteredToken passed(packed[j]);
      const auto token = static_cast<uint32_t>(holder * kSegmentTokens + passed.slot);
      const bool tie = passed.c == kClassTie;
      const unsigned mask = __ballot_sync(kFullWarp, tie);
      const int64_t mine = rank + __popc(mask & ((1u << lane) - 1));
      const bool before_split = tie && mine < skip;
      const bool hit =
          before_split && rule.tie_class < rule.strata && Drawn(rule, rule.tie_class, token);
      split.drawn += __popc(__ballot_sync(kFullWarp, hit));
      split.missed -= __popc(__ballot_sync(kFullWarp, before_split && !hit && !passed.resident));
      rank += __popc(mask);
      const unsigned turning = __ballot_sync(kFullWarp, tie && mine == skip);
      if (turning == 0) continue;
      split.heavy_from = __shfl_sync(kFullWarp, token, __ffs(turning) - 1);
      return split;
    }
  }
  return split;
}

// Finds out which ties are heavy and adds them to the block's columns: of the heavy bin's tokens
// all but the unit's first heavy_skip are. counts: of each block, its columns without ties. The
// block's first warp; the caller has synchronised the unit's blocks and does so again.
__device__ inline void SettleTies(const UnitRequest& u, const UnitBlocks& blocks,
                                  const OwnSegments& own, SampleRule& rule, DrawCounts& counts) {
  if (threadIdx.x >= 32) return;
  UnitState& state = *u.state;
  const int lane = threadIdx.x;
  const int64_t skip = state.heavy_skip;
  static_assert(kUnitBlocksMax <= 32);
  const int64_t ties = lane < blocks.count() ? blocks.Of(&counts, lane)->ties.all : 0;
  const int64_t all = WarpSum(ties);
  const int64_t before = WarpSum(lane < blocks.rank() ? ties : 0);
  const int64_t after = before + counts.ties.all;
  TieSplit split = {u.n, 0, counts.ties.drawn, counts.ties.drawn_missed};
  const bool holds = before <= skip && skip < after;
  if (holds) {
    split = SplitTies(u, rule, own, skip - before);
    if (skip == 0) split.heavy_from = 0;
  } else if (before > skip) {
    split = {0, counts.ties.all, 0, counts.ties.all_missed};
  }
  if (lane != 0) return;
  rule.heavy_from = split.heavy_from;
  counts.columns[0] += split.heavy;
  if (rule.tie_class < rule.strata) counts.columns[1 + rule.tie_class] += split.drawn;
  counts.columns[kMissedColumn] += split.missed;
  // Without such ties nothing turns: all of the bin's tokens are heavy, or none.
  if (holds || (blocks.rank() == 0 && skip >= all)) {
    state.heavy_from = skip == 0 ? 0 : split.heavy_from;
  }
}

// What a draw's columns come to: of the whole unit, and of the blocks before this one.
struct DrawTotals {
  int64_t all[kSegmentColumns];
  int64_t before[kSegmentColumns];
};

// All threads; the caller has synchronised the unit's blocks.
__device__ inline void SumCounts(const UnitBlocks& blocks, const DrawCounts& counts,
                                 DrawTotals& totals) {
  for (int c = threadIdx.x; c < kSegmentColumns; c += blockDim.x) {
    int64_t all = 0, before = 0;
    for (int rank = 0; rank < blocks.count(); ++rank) {
      const uint32_t count = blocks.Of(&counts, rank)->columns[c];
      all += count;
      if (rank < blocks.rank()) before += count;
    }
    totals.all[c] = all;
    totals.before[c] = before;
  }
  __syncthreads();
}

// The part of UnitState that settling a draw turns over, in shared memory.
struct DrawState : TailDraw {
  int64_t list_count;
  int64_t gathered;  // rows that the phases before bring over
  int64_t moved;     // rows that the phases before move
};

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
    draw.moved = phase == 0 ? 0 : s.moved_count;
  }
  for (int h = threadIdx.x; h < kTailStrataMax; h += blockDim.x) {
    draw.token_count[h] = s.stratum_count[h];
    draw.drawn[h] = s.drawn[h];
    draw.wanted[h] = h < s.strata ? s.budget[h] : 0;
    draw.drawn_threshold[h] = s.drawn_threshold[h];
    draw.threshold[h] = s.threshold[h];
  }
}

// Where a phase's rows go.
inline constexpr int kKinds = 1 + kTailStrataMax;  // see Kind()
struct DrawLayout {
  int64_t first[kKinds];  // of a kind's rows, in the list; of the exact rows, the sink's
  int first_split[kKinds + 1];
  int64_t split_rows;
  int64_t exact_count;
  int64_t gather_count;
  bool staged;
};

// Fills `layout`; the unit's first block tells the kernels that follow of it, of the splits that
// folding takes, and of what is drawn now. All threads of the block.
__device__ inline void LayOut(const UnitRequest& u, int phase, const int64_t* totals,
                              const DrawState& draw, bool first_block, DrawLayout& layout) {
  static_assert(kKinds <= 64);
  UnitState& s = *u.state;
  const int sets = 1 + draw.strata;
  const int64_t exact = phase == 0 ? u.sink + totals[0] + u.window : 0;
  const auto rows_of = [&](int set) { return set == 0 ? exact : set < sets ? totals[set] : 0; };
  if (threadIdx.x < 32) {
    // A lane has sets 2 lane and the next.
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
      layout.first[set] = after - high - low;
      layout.first_split[set] = splits_after - high_splits - low_splits;
    }
    if (set + 1 < sets) {
      layout.first[set + 1] = after - high;
      layout.first_split[set + 1] = splits_after - high_splits;
    }
    if (threadIdx.x == 0) {
      int64_t missed = totals[kMissedColumn];
      if (phase == 0) missed += MissedSink(u) + MissedWindow(u);
      // The third phase, of few rows and rare, has no gather.
      layout.staged = (phase == 1 || (phase == 0 && missed > kDirectRowsMax)) &&
                      draw.gathered + missed <= u.staging_rows;
      layout.gather_count = layout.staged ? missed : 0;
      layout.first_split[sets] = splits;
      layout.split_rows = rows;
      layout.exact_count = exact;
      if (first_block) {
        if (phase == 0) s.exact_count = exact;
        s.limited = draw.limited;
        s.list_count = end;
        s.split_count[phase] = splits;
        s.staged = layout.staged;
        s.moved_count = draw.moved + missed;
        s.gather_first = draw.gathered;
        s.gather_count = layout.gather_count;
      }
    }
  }
  __syncthreads();
  if (!first_block) return;
  for (int h = threadIdx.x; h < draw.strata; h += blockDim.x) {
    s.stratum_first[h] = layout.first[1 + h];
    s.stratum_drawn[phase][h] = totals[1 + h];
    s.drawn[h] = draw.drawn[h] + totals[1 + h];
    s.threshold[h] = draw.threshold[h];
  }
  for (int set = threadIdx.x / 32; set < sets; set += kDrawThreads / 32) {
    const int64_t rows = set == 0 ? exact : totals[set];
    for (int i = layout.first_split[set] + threadIdx.x % 32; i < layout.first_split[set + 1];
         i += 32) {
      const int64_t at = (i - layout.first_split[set]) * layout.split_rows;
      s.splits[phase][i] = {set, static_cast<int32_t>(min(layout.split_rows, rows - at)),
                            layout.first[set] + at};
    }
  }
}

}  // namespace spillway::cuda
