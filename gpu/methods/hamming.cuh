#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "gpu/kernels/page_scores.cuh"
#include "gpu/kernels/rotated_query.cuh"
#include "gpu/kernels/unit_start.cuh"
#include "gpu/methods/request.h"

// Scores by matching bits, and their histogram.
namespace spillway::cuda {

struct HammingShape {
  int plane_bits;                // bits of a key that are compared
  int heads_per_code;            // query heads that each of them is compared with
  const MethodRequest* methods;  // of the units, with an MLP; null: signs of rotated queries
};

// Fills query_planes for hamming: rows 0 to 7 are the bit planes of the number of query heads whose
// bit is set, row 8 is all ones. Grid (1, units). Shared memory: queries and rotated queries
// [G][d].
__global__ void PrepareHammingKernel(AttendShape shape, HammingShape hamming,
                                     PinnedRequests requests) {
  extern __shared__ float memory[];
  __shared__ UnitRequest u;
  __shared__ int32_t missing_sum;
  TriggerDependents();
  FetchRequest(requests, u);
  ClearUnit(shape, u);
  const int d = shape.head_dim;
  const int group = shape.group;
  const int heads = hamming.heads_per_code;
  const int words = shape.tiling.words;
  const int lane = threadIdx.x % 32;
  float* x = memory;
  float* rotated = memory + group * d;
  const uint32_t* const query_codes =
      hamming.methods != nullptr ? hamming.methods[blockIdx.y].query_codes : nullptr;
  if (threadIdx.x == 0) missing_sum = 0;
  for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
    x[i] = u.q[i] = requests.q[int64_t{blockIdx.y} * group * d + i];
  }
  __syncthreads();
  if (query_codes == nullptr) {
    for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
      rotated[i] = RotatedCoordinate(u.rotation_transposed, x + i / d * d, d, i % d);
    }
  }
  __syncthreads();
  for (int base = 0; base < words * 32; base += blockDim.x) {
    const int j = base + threadIdx.x;
    int set = 0;
    if (j < hamming.plane_bits) {
      for (int g = 0; g < heads; ++g) {
        if (query_codes != nullptr) {
          set += query_codes[g * words + j / 32] >> (j % 32) & 1u;
        } else {
          // A zero counts as positive, as in the codes of keys.
          set += rotated[g * d + j] >= 0 ? 1 : 0;
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      const bool bit = row < 8 ? (set >> row & 1) != 0 : row == 8 && j < hamming.plane_bits;
      const uint32_t bits = __ballot_sync(kFullWarp, bit);
      if (lane == 0 && j / 32 < words) u.query_planes[row * words + j / 32] = bits;
    }
    const int missing = WarpSum(j < hamming.plane_bits ? heads - set : 0);
    if (lane == 0) atomicAdd(&missing_sum, missing);
  }
  __syncthreads();
  if (threadIdx.x == 0) u.state->offset[0] = missing_sum;
  EndFirst(requests, u);
}

// Loads hamming's query bits as eight columns: planes 0 to 2 of the heads' counts, row 8 (which
// counts the key's own bits), planes 3 and 4, and zeros.
__device__ inline void LoadCountPlanes(const UnitRequest& u, int words, int fragments,
                                       uint32_t* planes) {
  for (int i = threadIdx.x; i < fragments * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int column = lane / 4;
    const int word = i / 32 * kFragmentWords + lane % 4;
    const int row = column < 3 ? column : column == 3 ? 8 : column < 6 ? column - 1 : -1;
    planes[i] = word < words && row >= 0 ? u.query_planes[row * words + word] : 0;
  }
}

// A key's score is its number of matching bits, summed over the group:
// 2 sum c k - m sum k + sum (m - c), where c_j of the m = heads_per_code query heads have bit j
// set. Grid (blocks, units); one warp per page. Shared memory: histogram [bin_count], query planes,
// a PageRing per warp.
__global__ void __launch_bounds__(kScoreThreads)
    ScoreHammingKernel(AttendShape shape, int heads_per_code, const UnitRequest* units) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  MarkUnscoredPages(u, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                    int64_t{gridDim.x} * blockDim.x);
  const int64_t page_end = u.scored_page_end();
  const int warps = blockDim.x / 32;
  const int64_t first_page = u.scored_page_begin() + static_cast<int64_t>(blockIdx.x) * warps;
  if (first_page >= page_end) return;
  const int fragments = shape.tiling.fragments();
  uint32_t* histogram = shared;
  uint32_t* planes = shared + shape.bin_count;
  for (int i = threadIdx.x; i < shape.bin_count; i += blockDim.x) histogram[i] = 0;
  LoadCountPlanes(u, shape.tiling.words, fragments, planes);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int32_t offset = u.state->offset[0];
  // Weights of the lane's columns, 2 (lane % 4) and the next.
  const int part = lane % 4;
  const int32_t even = part == 0 ? 2 : part == 1 ? 8 : part == 2 ? 16 : 0;
  const int32_t odd = part == 0 ? 4 : part == 1 ? -heads_per_code : part == 2 ? 32 : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  // Only the plane of signs, a page's last, is read; in the ring it is plane 0.
  const int plane_bytes = shape.tiling.words * kPageTokenCount * 4;
  const int64_t plane_offset = int64_t{shape.tiling.planes - 1} * plane_bytes;
  const int head_words = (shape.bin_count + fragments * 32 + 3) / 4 * 4;
  PageRing ring(reinterpret_cast<std::byte*>(shared + head_words) +
                    threadIdx.x / 32 * PageRing::kDepth * plane_bytes,
                plane_bytes);
  int64_t page_index = first_page + threadIdx.x / 32;
  const auto address = [&](int64_t p) -> const std::byte* {
    return p < page_end ? u.code_pages[p] + plane_offset : nullptr;
  };
  for (int i = 0; i < PageRing::kDepth; ++i) ring.Bring(address(page_index + i * step), lane);
  const std::byte* next = address(page_index + PageRing::kDepth * step);
  for (; page_index < page_end; page_index += step) {
    const std::byte* page = ring.Take();
    const PageSlots slots(u, page_index);
    int32_t acc[kCodeTilesPerPage][2][4] = {};
    for (int c = 0; c < fragments; ++c) {
      uint4 codes[kCodeTilesPerPage];
#pragma unroll
      for (int g = 0; g < kCodeTilesPerPage; ++g) {
        codes[g] = LoadCodes(shape.tiling, page, 0, g, c, lane);
      }
      const uint32_t b = planes[c * 32 + lane];
#pragma unroll
      for (int g = 0; g < kCodeTilesPerPage; ++g) {
        AndPopc(acc[g][0], codes[g].x, codes[g].y, b);
        AndPopc(acc[g][1], codes[g].z, codes[g].w, b);
      }
    }
#pragma unroll
    for (int g = 0; g < kCodeTilesPerPage; ++g) {
      // Sums over the columns; each exchange halves the octets that a lane holds.
      int32_t sums[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        sums[t] = even * acc[g][t / 2][t % 2 * 2] + odd * acc[g][t / 2][t % 2 * 2 + 1];
      }
      const bool high = (lane & 2) != 0, low = (lane & 1) != 0;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int32_t received = __shfl_xor_sync(kFullWarp, high ? sums[t] : sums[t + 2], 2);
        sums[t] = (high ? sums[t + 2] : sums[t]) + received;
      }
      const int32_t received = __shfl_xor_sync(kFullWarp, low ? sums[0] : sums[1], 1);
      const int32_t sum = (low ? sums[1] : sums[0]) + received;
      slots.Store(g * kCodeTileTokens + part * 8 + lane / 4, static_cast<uint32_t>(sum + offset),
                  histogram);
    }
    __syncwarp();  // before another page takes this one's place
    ring.Bring(next, lane);
    next = address(page_index + (PageRing::kDepth + 1) * step);
  }
  __syncthreads();
  AddToGlobal(histogram, shape.bin_count, u.histogram);
}

}  // namespace spillway::cuda
