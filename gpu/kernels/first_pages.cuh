#pragma once

#include "gpu/kernels/page_rows.cuh"

// Computes HeadStatistics of the first pages, and the norms of these pages.
namespace spillway::cuda {

inline constexpr int kValueBlockTokens = kCentreTokenCount / kValueBlockCount;
inline constexpr int kFirstPages = kCentreTokenCount / kPageTokenCount;

// The address of a token's value.
__device__ inline const std::byte* ValueAddress(const EncodeWork& work, int head, int64_t token) {
  return RowAddress(work.row_pages + head * work.row_page_capacity, work.row_bytes, token) +
         work.row_bytes / 2;
}

// Sets means [H][kValueBlockCount][d] of runs of values. Grid (kValueBlockCount, H), one thread per
// four dimensions.
__global__ void ValueMeansKernel(EncodeWork work, float* means) {
  constexpr int kLoads = 16;  // in flight: rows may lie in host memory
  static_assert(kValueBlockTokens % kLoads == 0 && kPageTokenCount % kValueBlockTokens == 0);
  const int i = threadIdx.x;
  if (4 * i >= work.head_dim) return;
  const int block = blockIdx.x;
  const int head = blockIdx.y;
  const std::byte* values = ValueAddress(work, head, block * kValueBlockTokens);
  double sum[4] = {};
  for (int first = 0; first < kValueBlockTokens; first += kLoads) {
    float4 v[kLoads];
#pragma unroll
    for (int t = 0; t < kLoads; ++t) {
      v[t] = LoadFour(work.dtype, values + (first + t) * work.row_bytes, i);
    }
#pragma unroll
    for (int t = 0; t < kLoads; ++t) {
      sum[0] += v[t].x;
      sum[1] += v[t].y;
      sum[2] += v[t].z;
      sum[3] += v[t].w;
    }
  }
  float* mean = means + (head * kValueBlockCount + block) * work.head_dim + 4 * i;
  for (int n = 0; n < 4; ++n) mean[n] = static_cast<float>(sum[n] / kValueBlockTokens);
}

// The median of kValueBlockCount numbers `stride` apart.
__device__ inline float MedianOfBlocks(const float* means, int stride) {
  float of_block[kValueBlockCount];
#pragma unroll
  for (int b = 0; b < kValueBlockCount; ++b) of_block[b] = means[b * stride];
  float median = 0;
#pragma unroll
  for (int b = 0; b < kValueBlockCount; ++b) {
    int below = 0;
#pragma unroll
    for (int other = 0; other < kValueBlockCount; ++other) {
      below += other < b ? of_block[other] <= of_block[b] : of_block[other] < of_block[b];
    }
    if (below == kValueBlockCount / 2) median = of_block[b];
  }
  return median;
}

// Sets value_centres, and distances [H][kCentreTokenCount] of the first values from them. Grid
// (blocks, H): kCentreTokenCount / gridDim.x tokens per block, one warp per token.
__global__ void ValueDistancesKernel(EncodeWork work, const float* means, float* value_centres,
                                     float* distances) {
  __shared__ __align__(16) float centre[kHeadDimMax];
  const int dim = work.head_dim;
  const int head = blockIdx.y;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    centre[i] = MedianOfBlocks(means + head * kValueBlockCount * dim + i, dim);
    if (blockIdx.x == 0) value_centres[head * dim + i] = centre[i];
  }
  __syncthreads();
  const int tokens = kCentreTokenCount / gridDim.x;
  for (int n = threadIdx.x / 32; n < tokens; n += blockDim.x / 32) {
    const int token = blockIdx.x * tokens + n;
    const float distance = WarpRadius(work.dtype, ValueAddress(work, head, token), centre, dim);
    if (threadIdx.x % 32 == 0) distances[head * kCentreTokenCount + token] = distance;
  }
}

inline constexpr int kStatisticsThreads = 32 * kFirstPages;

// Sets statistics and the norms of the first pages. radii [H][kCentreTokenCount]: of the keys. Grid
// (H).
__global__ void __launch_bounds__(kStatisticsThreads)
    StatisticsKernel(EncodeWork work, const float* radii, const float* distances,
                     HeadStatistics* statistics) {
  constexpr int kLaneTokens = kCentreTokenCount / 32;
  constexpr int kThreadTokens = kCentreTokenCount / kStatisticsThreads;
  __shared__ float page_median[kFirstPages];
  __shared__ float median_radius;
  __shared__ float reference;
  __shared__ double square[kCentreTokenCount];
  const int head = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  radii += head * kCentreTokenCount;
  distances += head * kCentreTokenCount;
  {
    float of_page[kPageTokenCount / 32];
#pragma unroll
    for (int n = 0; n < kPageTokenCount / 32; ++n) {
      of_page[n] = radii[warp * kPageTokenCount + n * 32 + lane];
    }
    const float median = WarpElement(of_page, kPageTokenCount / 2);
    if (lane == 0) page_median[warp] = median;
  }
  if (warp < 2) {
    const float* numbers = warp == 0 ? radii : distances;
    float of_lane[kLaneTokens];
    int zeros = 0;
#pragma unroll
    for (int n = 0; n < kLaneTokens; ++n) {
      of_lane[n] = numbers[n * 32 + lane];
      zeros += !(of_lane[n] > 0);
    }
    zeros = warp == 0 ? 0 : __reduce_add_sync(kFullWarp, zeros);
    // For distances, the median of those that are not 0: in ascending order, these come last.
    const int index = zeros + (static_cast<int>(kCentreTokenCount) - zeros) / 2;
    const float median = WarpElement(of_lane, index);
    if (lane == 0 && warp == 0) median_radius = median;
    if (lane == 0 && warp == 1) reference = zeros < kCentreTokenCount ? median : 1.0f;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kThreadTokens; ++n) {
    const int token = n * kStatisticsThreads + threadIdx.x;
    const int page_index = token / kPageTokenCount;
    const float distance = distances[token];
    const double ratio = static_cast<double>(distance) / static_cast<double>(reference);
    square[token] = ratio * ratio;
    std::byte* page = work.code_pages[head * work.code_page_capacity + page_index];
    NormAt(work.tiling, page, token % kPageTokenCount) =
        NormByte(IsStray(radii[token], page_median[page_index], median_radius),
                 ValueExponent(distance, reference));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
#pragma unroll 16
  for (int token = 0; token < kCentreTokenCount; ++token) sum += square[token];
  statistics[head] = {median_radius, reference, PowerOfTwoBelow(reference),
                      ValueFloor(sum / static_cast<double>(kCentreTokenCount))};
}

}  // namespace spillway::cuda
