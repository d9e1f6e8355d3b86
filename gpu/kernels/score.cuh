#pragma once

#include "gpu/kernels/score_page.cuh"

// Computes scores from codes, and their histogram.
namespace spillway::cuda {

// The pages of a wave are scored in rows: as many pages of a unit as a block has warps.
struct ScoreShare {
  int unit;   // of the first row
  int first;  // which row of the unit it is
  int count;  // rows, perhaps also of the units that follow
};

// A unit has at least one row, so that one block marks its pages without scored tokens.
__device__ inline int ScoreRows(const UnitRequest& u, int warps) {
  const int64_t pages = u.scored_page_end() - u.scored_page_begin();
  return static_cast<int>(max(int64_t{1}, (pages + warps - 1) / warps));
}

// The block's rows. All blocks get as many, up to one, whatever the number of units and their
// lengths. again: only rows of units whose heads are weighted again. All lanes of a warp.
__device__ inline ScoreShare ShareOfBlock(const UnitRequest* units, int unit_count, int warps,
                                          bool again) {
  const int lane = threadIdx.x % 32;
  const auto rows_of = [&](int i) {
    if (i >= unit_count || (again && !units[i].state->reweighed)) return 0;
    return ScoreRows(units[i], warps);
  };
  int total = 0;
#pragma unroll 4
  for (int i = lane; i < unit_count; i += 32) total += rows_of(i);
  total = __reduce_add_sync(kFullWarp, total);
  const auto begin_of = [&](unsigned block) {
    return static_cast<int>(int64_t{total} * block / gridDim.x);
  };
  const int begin = begin_of(blockIdx.x);
  ScoreShare share = {0, 0, begin_of(blockIdx.x + 1) - begin};
  int before = 0;
  for (int base = 0; base < unit_count; base += 32) {
    const int rows = rows_of(base + lane);
    int upto = before + rows;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int lower = __shfl_up_sync(kFullWarp, upto - before, apart);
      if (lane >= apart) upto += lower;
    }
    const unsigned reached = __ballot_sync(kFullWarp, upto > begin);
    if (reached != 0) {
      const int at = __ffs(reached) - 1;
      share.unit = base + at;
      share.first = begin - __shfl_sync(kFullWarp, upto - rows, at);
      break;
    }
    before = __shfl_sync(kFullWarp, upto, 31);
  }
  return share;
}

// A warp's pages first, first + step, ... before `end`, copied to shared memory ahead of their
// turn. Addresses of pages are loaded one page before the pages are copied.
template <typename Scorer>
class PageWalk {
 public:
  __device__ PageWalk(const AttendShape& shape, const UnitRequest& u, PageRing ring, int64_t first,
                      int64_t end, int64_t step)
      : shape_(shape), u_(u), ring_(ring), end_(end), step_(step), index_(first) {
    next_ = Address(index_);
    for (int i = 0; i < PageRing::kDepth; ++i) {
      const std::byte* after = Address(index_ + (i + 1) * step_);
      ring_.Bring(next_, lane_);
      next_ = after;
    }
    next_centre_ = Centre(index_);
  }

  // Calls f(codes, index, centre logits) for each page. All lanes.
  template <typename F>
  __device__ void ForEach(F f) {
    for (; index_ < end_; index_ += step_) {
      const std::byte* codes = ring_.Take();
      const CentreLogits centre = next_centre_;
      next_centre_ = Centre(index_ + step_);
      f(codes, index_, centre);
      __syncwarp();  // before the next copy overwrites this page
      ring_.Bring(next_, lane_);
      next_ = Address(index_ + (PageRing::kDepth + 1) * step_);
    }
  }

 private:
  using CentreLogits = typename Scorer::CentreLogits;

  __device__ const std::byte* Address(int64_t page_index) const {
    return page_index < end_ ? u_.code_pages[page_index] : nullptr;
  }
  __device__ CentreLogits Centre(int64_t page_index) const {
    CentreLogits centre;
#pragma unroll
    for (int q = 0; q < Scorer::kQuartets; ++q) {
      const int head = q * 4 + lane_ % 4;
      centre.of_quartet[q] = page_index < end_ && head < shape_.group
                                 ? u_.centre_logits[page_index * shape_.group + head]
                                 : 0.0f;
    }
    return centre;
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  PageRing ring_;
  const int64_t end_;
  const int64_t step_;
  int64_t index_;
  const std::byte* next_;
  CentreLogits next_centre_;
  const int lane_ = threadIdx.x % 32;
};

// The terms of all query heads; those beyond the group have weight 0. The caller synchronises.
__device__ inline void LoadHeadTerms(const AttendShape& shape, const UnitRequest& u, bool again,
                                     HeadTerms (&heads)[kGroupMax]) {
  const int g = threadIdx.x;
  if (g >= kGroupMax) return;
  HeadTerms terms = {0, 0, 0, 0, 0};
  if (g < shape.group) {
    const UnitState& state = *u.state;
    terms = {state.offset[g], state.coefficient[g], FromOrderedBits(state.reference[g]),
             again ? state.head_weight[g] : ScoreHeadWeight(state.mass[g]),
             LevelShrinkage(state.rank_error_scale[g])};
  }
  heads[g] = terms;
}

// Computes the score bin of every token (same bits as on the CPU device), the units' histograms,
// the RankSums of each page and, of a coded unit, the levels of x^. Grid: any number of blocks,
// which share the pages of all units; one warp per page. Shared memory: histogram [kScoreBinCount],
// query planes, and one PageRing per warp. again: scores only units whose heads are weighted again,
// with the new weights. See PageScorer for kMass and kOneQuartet.
template <int kPlanes, int kFragments, bool kMass, bool kOneQuartet>
__global__ void __launch_bounds__(kScoreThreads, 1)
    ScoreAsymmetricKernel(AttendShape shape, bool again, int unit_count, const UnitRequest* units) {
  using Scorer = PageScorer<kPlanes, kFragments, kMass, kOneQuartet>;
  // Aligned so that pages are copied to whole lines of shared memory.
  extern __shared__ __align__(128) uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  __shared__ UnitRequest u;
  __shared__ ScoreShare share;
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int page_bytes = ScoredBytes(shape.tiling);
  const int quartets = (shape.group + 3) / 4;
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  auto* rings = reinterpret_cast<std::byte*>(planes + quartets * kFragments * 32);
  // The kernel before the second pass tells which units it scores.
  bool waits = true;
  const auto wait = [&] {
    if (!waits) return;
    GridDependencyWait();
    TriggerDependents();
    waits = false;
  };
  if (again) wait();
  if (warp == 0) share = ShareOfBlock(units, unit_count, warps, again);
  __syncthreads();
  int first = share.first;
  int left = share.count;
  for (int unit = share.unit; left > 0; ++unit, first = 0) {
    LoadRequest(units + unit, u);
    if (again && !u.state->reweighed) continue;
    const int rows = min(ScoreRows(u, warps) - first, left);
    left -= rows;
    const int64_t first_page = u.scored_page_begin() + int64_t{first} * warps;
    // Of the kernels before this one, only the last may still run; in the first pass it computes
    // the references' masses. Only its results must be read after the wait: the codes and
    // everything else are complete.
    PageWalk<Scorer> walk(shape, u, {rings + warp * PageRing::kDepth * page_bytes, page_bytes},
                          first_page + warp,
                          min(u.scored_page_end(), first_page + int64_t{rows} * warps), warps);
    const int usual_level = WarpUsualLevel(shape.tiling, u);
    LoadQueryPlanes(u, quartets, shape.tiling.words, kFragments, planes);
    for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
    wait();
    if (first == 0) MarkUnscoredPages(u, threadIdx.x, blockDim.x);
    LoadHeadTerms(shape, u, again, heads);
    // The first pass has written the levels.
    if (again && threadIdx.x == 0) u.codes.levels = nullptr;
    __syncthreads();
    Scorer scorer(shape, u, usual_level, heads, planes, histogram);
    walk.ForEach([&](const std::byte* codes, int64_t page_index, const auto& centre) {
      scorer.Score(codes, page_index, centre);
    });
    __syncthreads();
    AddToGlobal(histogram, kScoreBinCount, u.histogram);
    __syncthreads();  // before the next unit takes the shared memory
  }
  wait();
}

}  // namespace spillway::cuda
