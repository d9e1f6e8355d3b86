#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/rank_error.h"
#include "host/core/score.h"

// Adds up the page sums of a unit: how large the errors of the estimated logits are, and whether
// heads must be weighted again.
namespace spillway::cuda {

// Sets UnitState::rank_variance, with sums in the order of host/core/rank_error.h, and
// UnitState::reweighed. If heads are weighted again, also sets their weights and clears the
// histogram. Grid (heads, units); kRankPageChains threads.
__global__ void __launch_bounds__(kRankPageChains)
    RankTotalsKernel(AttendShape shape, const UnitRequest* units) {
  static_assert((kRankPageChains & (kRankPageChains - 1)) == 0);
  __shared__ RankSums<double> chains[kRankPageChains];
  __shared__ bool far_apart;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const int head = blockIdx.x;
  const int chain = threadIdx.x;
  const int64_t begin = u.scored_page_begin();
  const int64_t end = u.scored_page_end();
  RankSums<double> sum = {0, 0};
  // Starts at the chain's first page with scored tokens. Several pages are loaded together.
  constexpr int kAhead = 8;
  for (int64_t first = begin + ((chain - begin) & (kRankPageChains - 1)); first < end;
       first += kAhead * kRankPageChains) {
    RankSums<float> of_pages[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t page = first + i * kRankPageChains;
      of_pages[i] = {0, 0};
      if (page < end) of_pages[i] = u.rank_sums[page * shape.group + head];
    }
#pragma unroll
    for (const RankSums<float>& of_page : of_pages) {
      sum.weight += of_page.weight;
      sum.error += of_page.error;
    }
  }
  // In the order of SumChains(): in shared memory until one warp is left, then by shuffles.
  chains[chain] = sum;
#pragma unroll
  for (int apart = kRankPageChains / 2; apart >= 32; apart /= 2) {
    __syncthreads();
    if (chain >= apart) continue;
    sum.weight += chains[chain + apart].weight;
    sum.error += chains[chain + apart].error;
    chains[chain] = sum;
  }
  if (chain < 32) {
    sum.weight = WarpSum(sum.weight);
    sum.error = WarpSum(sum.error);
  }
  if (chain == 0) {
    state.rank_variance[head] = RankVariance(state.rank_error_scale[head], sum);
    state.score_sum[head] = sum.weight;
  }
  if (!IsLastBlock(shape.group, state.heads_totalled)) return;
  if (chain < 32) {
    // One lane per head. Past the L1 cache, because other blocks wrote the sums.
    static_assert(kGroupMax <= 32);
    const bool present = chain < shape.group;
    const double of_head = present ? __ldcg(&state.score_sum[chain]) : 0.0;
    const float weight = present ? ScoreHeadWeight(state.mass[chain]) : 0.0f;
    HeadShares shares{};
    for (int g = 0; g < shape.group; ++g) {
      shares.Add(__shfl_sync(kFullWarp, weight, g), __shfl_sync(kFullWarp, of_head, g));
    }
    const bool apart = shares.AreFarApart();
    if (present && apart) state.head_weight[chain] = shares.WeightOf(of_head);
    if (chain == 0) state.reweighed = far_apart = apart;
  }
  __syncthreads();
  for (int i = chain; i < shape.bin_count && far_apart; i += kRankPageChains) u.histogram[i] = 0;
}

}  // namespace spillway::cuda
