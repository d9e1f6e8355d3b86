#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/page_index.h"

// Helpers for a unit's histogram: its strays, and its sums from the highest bin down.
namespace spillway::cuda {

// Number of strays among the scored tokens, from their bin of the histogram.
__device__ inline int64_t ScoredStrays(const AttendShape& shape, const UnitRequest& u) {
  return shape.weighed ? u.histogram[kStrayBin] : 0;
}

inline constexpr int kCutThreads = 1024;

// Replaces each count by the number of tokens in that bin and above. A block of kCutThreads.
__device__ inline void SuffixSums(uint32_t* counts, int bin_count) {
  __shared__ uint32_t warp_sums[kCutThreads / 32];
  const int per_thread = (bin_count + kCutThreads - 1) / kCutThreads;
  // Thread 0 has the highest bins.
  const int end = bin_count - static_cast<int>(threadIdx.x) * per_thread;
  const int begin = max(end - per_thread, 0);
  uint32_t sum = 0;
  for (int b = begin; b < end; ++b) sum += counts[b];
  const int lane = threadIdx.x % 32;
  const uint32_t scan = WarpScan(sum);
  if (lane == 31) warp_sums[threadIdx.x / 32] = scan;
  __syncthreads();
  uint32_t above = scan - sum;
  for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w) above += warp_sums[w];
  for (int b = end - 1; b >= begin; --b) {
    above += counts[b];
    counts[b] = above;
  }
  __syncthreads();
}

}  // namespace spillway::cuda
