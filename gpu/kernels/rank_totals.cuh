#pragma once

#include "gpu/kernels/bin_sums.cuh"
#include "host/core/rank_error.h"

// How far off a unit's estimated logits are, from the sums of its pages.
namespace spillway::cuda {

// Sets UnitState::rank_variance, in the order of sums of host/core/rank_error.h.
// A block of kCutThreads; the caller synchronises.
__device__ inline void SetRankVariances(const AttendShape& shape, const UnitRequest& u) {
  constexpr int kHeadsAtOnce = kCutThreads / kRankPageChains;
  static_assert((kRankPageChains & (kRankPageChains - 1)) == 0);
  __shared__ RankSums<double> chains[kCutThreads];
  UnitState& state = *u.state;
  if (!u.knows_rank_error) {
    if (threadIdx.x < shape.group) state.rank_variance[threadIdx.x] = 0;
    return;
  }
  const int chain = threadIdx.x % kRankPageChains;
  const int64_t begin = u.scored_page_begin();
  const int64_t end = u.scored_page_end();
  for (int first = 0; first < shape.group; first += kHeadsAtOnce) {
    const int head = first + static_cast<int>(threadIdx.x) / kRankPageChains;
    const bool present = head < shape.group;
    RankSums<double> sum = {0, 0};
    if (present) {
      // Its first page that has scored tokens.
      const int64_t page = begin + ((chain - begin) & (kRankPageChains - 1));
#pragma unroll 4
      for (int64_t p = page; p < end; p += kRankPageChains) {
        const RankSums<float> of_page = u.rank_sums[p * shape.group + head];
        sum.weight += of_page.weight;
        sum.error += of_page.error;
      }
    }
    // As SumChains(), by the block down to a warp, then by shuffles.
    chains[threadIdx.x] = sum;
#pragma unroll
    for (int apart = kRankPageChains / 2; apart >= 32; apart /= 2) {
      __syncthreads();
      if (chain >= apart) continue;
      sum.weight += chains[threadIdx.x + apart].weight;
      sum.error += chains[threadIdx.x + apart].error;
      chains[threadIdx.x] = sum;
    }
    if (chain < 32) {
      sum.weight = WarpSum(sum.weight);
      sum.error = WarpSum(sum.error);
    }
    if (chain == 0 && present) {
      state.rank_variance[head] = RankVariance(state.rank_error_scale[head], sum);
    }
    __syncthreads();  // before the next heads' chains
  }
}

}  // namespace spillway::cuda
