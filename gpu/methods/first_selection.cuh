#pragma once

#include "gpu/kernels/bin_sums.cuh"
#include "gpu/methods/request.h"

// Finds the candidates of a first selection, which the second one ranks.
namespace spillway::cuda {

// Finds the threshold: all tokens of higher bins are candidates, and all of the threshold's bin but
// the first `skip`. One block per unit. Shared memory: above [bins].
__global__ void __launch_bounds__(kCutThreads)
    CandidateThresholdKernel(int bins, const MethodRequest* methods, const UnitRequest* units) {
  extern __shared__ uint32_t above[];  // tokens of a bin and above
  __shared__ UnitRequest u;
  Begin(units + blockIdx.x, u);
  for (int i = threadIdx.x; i < bins; i += blockDim.x) above[i] = u.histogram[i];
  __syncthreads();
  SuffixSums(above, bins);
  if (threadIdx.x != 0) return;
  const MethodRequest m = methods[blockIdx.x];
  const int bin = max(LastBinReaching(bins, m.candidate_count, [&](int b) { return above[b]; }), 0);
  const int64_t missing = int64_t{above[bin]} - m.candidate_count;
  *m.first_selection = {bin, max(missing, int64_t{0})};
}

// Counts each segment's tokens of the threshold's bin. Grid (segments, units).
__global__ void CountCandidateTiesKernel(const MethodRequest* methods, const UnitRequest* units) {
  __shared__ UnitRequest u;
  __shared__ uint32_t total;
  Begin(units + blockIdx.y, u);
  const int bin = methods[blockIdx.y].first_selection->bin;
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    const int64_t from = max(segment * kSegmentTokens, u.begin);
    const int64_t to = min((segment + 1) * kSegmentTokens, u.end);
    uint32_t count = 0;
    for (int64_t t = from + threadIdx.x; t < to; t += blockDim.x) count += u.bins[t] == bin;
    count = WarpSum(count);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, count);
    __syncthreads();
    if (threadIdx.x == 0) u.segment_counts[segment] = total;
  }
}

// Writes candidate_mask, one bit per token. One warp goes through a segment in token order; grid
// (segments, units).
__global__ void MarkCandidatesKernel(const MethodRequest* methods, const UnitRequest* units) {
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const int lane = threadIdx.x;
  const MethodRequest m = methods[blockIdx.y];
  const int bin = m.first_selection->bin;
  const int64_t skip = m.first_selection->skip;
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    int64_t rank = 0;  // number of earlier tokens of the bin
    for (int64_t c = lane; c < segment; c += 32) rank += u.segment_counts[c];
    rank = WarpSum(rank);
    const int64_t to = min((segment + 1) * kSegmentTokens, u.n);
    for (int64_t base = segment * kSegmentTokens; base < to; base += 32) {
      const int64_t t = base + lane;
      const int own = t >= u.begin && t < u.end ? u.bins[t] : -1;
      const unsigned ties = __ballot_sync(kFullWarp, own == bin);
      const bool found =
          own > bin || (own == bin && rank + __popc(ties & ((1u << lane) - 1)) >= skip);
      const unsigned mask = __ballot_sync(kFullWarp, found);
      if (lane == 0) m.candidate_mask[base / 32] = mask;
      rank += __popc(ties);
    }
  }
}

// After the second selection's scores: moves all tokens that are no candidates to kNotFoundBin.
// Grid (blocks, units).
__global__ void DropOthersKernel(AttendShape shape, const MethodRequest* methods,
                                 const UnitRequest* units) {
  __shared__ uint32_t dropped[kScoreBinCount];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const uint32_t* const candidate_mask = methods[blockIdx.y].candidate_mask;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) dropped[i] = 0;
  __syncthreads();
  for (int64_t t = u.begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < u.end;
       t += int64_t{gridDim.x} * blockDim.x) {
    if ((candidate_mask[t / 32] >> (t % 32) & 1u) != 0) continue;
    atomicAdd(&dropped[u.bins[t]], 1u);
    u.bins[t] = kNotFoundBin;
    for (int h = 0; shape.by_mass && h < shape.group; ++h) {
      u.head_bins[h * u.n + t] = kNotFoundBin;
    }
  }
  __syncthreads();
  uint32_t total = 0;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) {
    if (dropped[i] > 0) atomicSub(&u.histogram[i], dropped[i]);
    total += dropped[i];
  }
  total = WarpSum(total);
  if (threadIdx.x % 32 == 0 && total > 0) atomicAdd(&u.histogram[kNotFoundBin], total);
}

}  // namespace spillway::cuda
