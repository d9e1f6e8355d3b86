#pragma once

#include "gpu/kernels/place.cuh"

// A phase's draw in one kernel: what is let through, how many rows of which class these are, the
// list. The blocks of a unit take runs of its segments, in token order.
namespace spillway::cuda {

// Draws with other thresholds until the verdict takes what was drawn: rare. `collected` are the
// thresholds that the filter has let through. All threads of all blocks of the unit, which all come
// to the same.
__device__ inline void SettleDraw(const UnitRequest& u, int phase, int bin_count,
                                  const UnitBlocks& blocks, const OwnSegments& own,
                                  uint8_t* class_of_bin, BinTable& table, SampleRule& rule,
                                  DrawState& draw, DrawCounts& counts, DrawTotals& totals) {
  __shared__ uint64_t collected[kTailStrataMax];
  __shared__ uint16_t limits[kClassCount];
  __shared__ DrawVerdict verdict;
  __shared__ bool collect;
  if (threadIdx.x < kTailStrataMax) collected[threadIdx.x] = draw.threshold[threadIdx.x];
  const auto clear = [&] {
    for (int c = threadIdx.x; c < kSegmentColumns; c += kDrawThreads) counts.columns[c] = 0;
    __syncthreads();
  };
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      verdict = phase == 0 ? JudgePilot(totals.all + 1, draw) : JudgeSample(totals.all + 1, draw);
      collect = false;
      for (int h = 0; h < draw.strata && verdict == DrawVerdict::kDrawAgain; ++h) {
        if (draw.threshold[h] <= collected[h]) continue;
        collected[h] = draw.threshold[h];
        collect = true;
      }
    }
    __syncthreads();
    if (verdict == DrawVerdict::kTake) return;
    blocks.Sync();  // all have read the counts
    if (collect) {
      LoadRanges(u, phase, collected, rule);
      for (int c = threadIdx.x; c < kClassCount; c += kDrawThreads) {
        const uint2 range = rule.ranges[c];
        limits[c] = range.x <= range.y ? HashLimit(u.order, range.y + uint64_t{1}) : 0;
      }
      __syncthreads();
      LoadBins(u, bin_count, class_of_bin, limits, table);
      __syncthreads();
      for (int64_t segment = own.begin; segment < own.end; ++segment) {
        OwnTokens tokens;
        tokens.Load(u, segment);
        FilterSegment(u, rule, table, phase, /*near_bin=*/0, segment, tokens, counts);
      }
    }
    LoadRanges(u, phase, draw.threshold, rule);
    clear();
    for (int64_t segment = own.begin + threadIdx.x / 32; segment < own.end;
         segment += kDrawThreads / 32) {
      CountSegment(u, rule, phase, segment, counts);
    }
    blocks.Sync();
    SumCounts(blocks, counts, totals);
  }
}

// Grid (blocks of a unit, units). Shared memory: ClassBytes().
__global__ void __launch_bounds__(kDrawThreads)
    DrawKernel(int phase, int bin_count, int64_t row_bytes, const UnitRequest* units) {
  extern __shared__ __align__(16) uint8_t class_of_bin[];
  __shared__ BinTable table;
  __shared__ SampleRule rule;
  __shared__ DrawState draw;
  __shared__ DrawCounts counts;
  __shared__ DrawTotals totals;
  __shared__ DrawLayout layout;
  __shared__ UnitRequest u;
  const UnitBlocks blocks;
  LoadRequest(units + blockIdx.y, u);
  const OwnSegments own = OwnSegments::Of(u, blocks);
  // The kernel before does not write bins.
  OwnTokens tokens, next;
  const auto load = [&](OwnTokens& of, int64_t segment) {
    if (segment < own.end) of.Load(u, segment);
  };
  load(tokens, own.begin);
  GridDependencyWait();
  TriggerDependents();
  UnitState& state = *u.state;
  const bool first_block = blocks.rank() == 0;
  if (phase > 0 && !state.drawing) {
    if (first_block && threadIdx.x == 0) {
      state.gather_count = 0;
      state.split_count[phase] = 0;
    }
    return;
  }
  const int near_bin = state.near_bin;
  LoadBins(u, bin_count, class_of_bin, state.limit_of_class, table);
  LoadDraw(u, phase, draw);
  for (int c = threadIdx.x; c < kSegmentColumns; c += kDrawThreads) counts.columns[c] = 0;
  if (threadIdx.x == 0) counts.ties = {0, 0, 0, 0};
  LoadRule(u, phase, rule);
  for (int64_t segment = own.begin; segment < own.end; ++segment) {
    load(next, segment + 1);
    FilterSegment(u, rule, table, phase, near_bin, segment, tokens, counts);
    tokens = next;
  }
  blocks.Sync();
  if (phase == 0) {
    SettleTies(u, blocks, own, rule, counts);
    blocks.Sync();
  }
  SumCounts(blocks, counts, totals);
  SettleDraw(u, phase, bin_count, blocks, own, class_of_bin, table, rule, draw, counts, totals);
  blocks.Arrive();  // nothing is read of the others any more
  LayOut(u, phase, totals.all, draw, first_block, layout);
  PlaceRows(u, phase, row_bytes, blocks, own, rule, draw, totals, layout);
  blocks.Wait();
}

}  // namespace spillway::cuda
