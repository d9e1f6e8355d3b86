#pragma once

#include "gpu/kernels/score_page.cuh"

// Computes scores from codes, and their histogram.
namespace spillway::cuda {

// A warp's pages first, first + step, ... before `end`, copied to shared memory ahead of their
// turn. Addresses of pages are loaded one page before the pages are copied.
template <typename Scorer>
class PageWalk {
 public:
  __device__ PageWalk(const AttendShape& shape, const UnitRequest& u, PageRing ring, int64_t first,
                      int64_t step)
      : shape_(shape), u_(u), ring_(ring), end_(u.scored_page_end()), step_(step), index_(first) {
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

// Computes the score bin of every token (same bits as on the CPU device), the unit's histogram,
// the RankSums of each page and, of a coded unit, the levels of x^. Grid (blocks, units); one warp
// per page. Shared memory: histogram [kScoreBinCount], query planes, and one PageRing per warp.
// again: scores only units whose heads are weighted again, with the new weights. See PageScorer for
// kMass and kOneQuartet.
template <int kPlanes, int kFragments, bool kMass, bool kOneQuartet>
__global__ void __launch_bounds__(kScoreThreads, 1)
    ScoreAsymmetricKernel(AttendShape shape, bool again, const UnitRequest* units) {
  using Scorer = PageScorer<kPlanes, kFragments, kMass, kOneQuartet>;
  // Aligned so that pages are copied to whole lines of shared memory.
  extern __shared__ __align__(128) uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  if (again) {
    GridDependencyWait();
    if (!u.state->reweighed) return;
    // The first pass has written the levels.
    if (threadIdx.x == 0) u.codes.levels = nullptr;
    __syncthreads();
  }
  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_page = u.scored_page_begin() + static_cast<int64_t>(blockIdx.x) * warps;
  const int page_bytes = ScoredBytes(shape.tiling);
  const int quartets = (shape.group + 3) / 4;
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  auto* rings = reinterpret_cast<std::byte*>(planes + quartets * kFragments * 32);
  // Of the kernels before this one, only the last may still run; in the first pass it computes the
  // references' masses. Only its results must be read after GridDependencyWait(): the codes and
  // everything else are complete.
  PageWalk<Scorer> walk(shape, u, {rings + warp * PageRing::kDepth * page_bytes, page_bytes},
                        first_page + warp, static_cast<int64_t>(gridDim.x) * warps);
  const int usual_level = WarpUsualLevel(shape.tiling, u);
  LoadQueryPlanes(u, quartets, shape.tiling.words, kFragments, planes);
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  GridDependencyWait();
  TriggerDependents();
  MarkUnscoredPages(u);
  if (first_page >= u.scored_page_end()) return;
  LoadHeadTerms(shape, u, again, heads);
  __syncthreads();
  Scorer scorer(shape, u, usual_level, heads, planes, histogram);
  walk.ForEach([&](const std::byte* codes, int64_t page_index, const auto& centre) {
    scorer.Score(codes, page_index, centre);
  });
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

}  // namespace spillway::cuda
