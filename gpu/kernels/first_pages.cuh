#pragma once

#include "gpu/kernels/page_norms.cuh"

// Computes HeadStatistics and the first value centre of the first pages, and the norms of these
// pages.
namespace spillway::cuda {

// The address of a token's row.
__device__ inline const std::byte* RowAddress(const EncodeWork& work, int head, int64_t token) {
  return RowAddress(work.row_pages + head * work.row_page_capacity, work.row_bytes, token);
}

// Sets distances [H][kCentreTokenCount] of the first values from the centres [H][pages][d] of their
// pages. Grid (blocks, H): kCentreTokenCount / gridDim.x tokens of one page per block, one warp per
// token.
__global__ void ValueDistancesKernel(EncodeWork work, const float* page_centres, float* distances) {
  const int head = blockIdx.y;
  const int tokens = kCentreTokenCount / gridDim.x;
  const int first = blockIdx.x * tokens;
  const float* centre =
      page_centres + (head * kFirstPageCount + first / kPageTokenCount) * work.head_dim;
  for (int n = threadIdx.x / 32; n < tokens; n += blockDim.x / 32) {
    const std::byte* const row = RowAddress(work, head, first + n);
    const float distance =
        WarpRadius([&](int i) { return ValueFour(work.format(), row, i); }, centre, work.head_dim);
    if (threadIdx.x % 32 == 0) distances[head * kCentreTokenCount + first + n] = distance;
  }
}

inline constexpr int kStatisticsThreads = 32 * kFirstPageCount;

// Sets statistics, first value centres, and the norms of the first pages. radii
// [H][kCentreTokenCount]: of the keys; page_centres [H][pages][d]: of the values. Grid (H).
__global__ void __launch_bounds__(kStatisticsThreads)
    StatisticsKernel(EncodeWork work, const float* radii, const float* page_centres,
                     const float* distances, HeadIndex heads) {
  constexpr int kLaneTokens = kCentreTokenCount / 32;
  constexpr int kThreadTokens = kCentreTokenCount / kStatisticsThreads;
  __shared__ float page_median[kFirstPageCount];
  __shared__ float median_radius;
  __shared__ float reference;
  __shared__ double square[kCentreTokenCount];
  __shared__ HeadStatistics statistics;
  __shared__ __align__(16) float first_centre[kHeadDimMax];
  const int dim = work.head_dim;
  const int head = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  radii += head * kCentreTokenCount;
  distances += head * kCentreTokenCount;
  page_centres += head * kFirstPageCount * dim;
  for (int i = threadIdx.x; i < dim; i += kStatisticsThreads) {
    first_centre[i] = MedianOf<kFirstPageCount>(page_centres + i, dim);
    heads.value_centres[head * dim + i] = first_centre[i];
  }
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
    const double ratio = static_cast<double>(distances[token]) / static_cast<double>(reference);
    square[token] = ratio * ratio;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
#pragma unroll 16
    for (int token = 0; token < kCentreTokenCount; ++token) sum += square[token];
    statistics = {median_radius, reference, PowerOfTwoBelow(reference),
                  ValueFloor(sum / static_cast<double>(kCentreTokenCount))};
    heads.statistics[head] = statistics;
  }
  __syncthreads();
  // One warp per page, four tokens per lane.
  int exponent[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    exponent[n] = ValueExponent(distances[warp * kPageTokenCount + 4 * lane + n], reference);
  }
  const int lift =
      PageLift(statistics, dim,
               make_float4(static_cast<float>(exponent[0]), static_cast<float>(exponent[1]),
                           static_cast<float>(exponent[2]), static_cast<float>(exponent[3])),
               page_centres + warp * dim, first_centre);
  std::byte* page = work.code_pages[head * work.code_page_capacity + warp];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int slot = 4 * lane + n;
    const bool stray =
        IsStray(radii[warp * kPageTokenCount + slot], page_median[warp], median_radius);
    NormAt(work.tiling, page, slot) = NormByte(stray, exponent[n], statistics.value_floor, lift);
  }
}

}  // namespace spillway::cuda
