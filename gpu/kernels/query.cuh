#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/query_code.h"

// Query heads as the bit planes that tensor cores multiply with codes.
namespace spillway::cuda {

// y_j of P x, x in shared memory: one chain of fused multiply-adds over i, its
// matrix column read well ahead.
__device__ inline float RotatedCoordinate(const float* transposed, const float* x, int d, int j) {
  constexpr int kAhead = 32;
  float y = 0;
  float column[2][kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    column[0][i] = i < d ? __ldg(transposed + i * d + j) : 0.0f;
  }
  for (int base = 0; base < d; base += 2 * kAhead) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = base + half * kAhead;
      if (at >= d) break;
      if (at + kAhead < d) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = at + kAhead + i;
          column[1 - half][i] = row < d ? __ldg(transposed + row * d + j) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i < d) y = fmaf(column[half][i], x[at + i], y);
      }
    }
  }
  return y;
}

// What every selector's units start from; shared by the grid's x.
__device__ inline void ClearUnit(const AttendShape& shape, const UnitRequest& u) {
  UnitState& state = *u.state;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = thread; i < shape.bin_count; i += threads) u.histogram[i] = 0;
  if (u.by_mass) {
    for (int64_t i = thread; i < shape.group * kScoreBinCount; i += threads) {
      u.head_histograms[i] = 0;
    }
    for (int64_t i = thread; i < shape.group * u.chunks(); i += threads) u.head_ties[i] = 0;
  }
  if (thread == 0) {
    state.error_token = kNoToken;
    state.heavy_count = 0;
    state.heads_done = 0;
  }
  if (thread < kGroupMax) {
    state.reference[thread] = INT32_MIN;
    state.mass[thread] = 0;
  }
}

// What a wave's first kernel has of its requests.
struct PinnedRequests {
  const UnitRequest* units;  // pinned
  const float* q;            // pinned, [units][G][d]
  UnitRequest* copies;       // device
};

// A wave's first kernel may run beside a step's append, and ends after it.
__device__ inline void EndFirst() { GridDependencyWait(); }

// A unit's request from across the link, for the block and, by the first block
// of the grid's x, for the kernels that follow. Leaves that block's request
// for the caller to synchronise.
__device__ inline void FetchRequest(const PinnedRequests& requests, UnitRequest& u) {
  LoadRequest(requests.units + blockIdx.y, u);
  if (blockIdx.x != 0) return;
  const auto* source = reinterpret_cast<const uint64_t*>(&u);
  auto* target = reinterpret_cast<uint64_t*>(requests.copies + blockIdx.y);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(UnitRequest) / 8); i += blockDim.x) {
    target[i] = source[i];
  }
}

// `oracle` needs no more. Grid (blocks, units).
__global__ void ClearUnitKernel(AttendShape shape, PinnedRequests requests) {
  __shared__ UnitRequest u;
  TriggerDependents();
  FetchRequest(requests, u);
  ClearUnit(shape, u);
  const int size = shape.group * shape.head_dim;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    u.q[i] = requests.q[int64_t{blockIdx.y} * size + i];
  }
  EndFirst();
}

// asymmetric: levels of query_code.h, stored as w + 8 in planes;
// row = plane * 4 + head of the tile. Grid (heads of the tiles, units), a
// thread per dimension, padded to 32.
__global__ void PrepareAsymmetricKernel(AttendShape shape, PinnedRequests requests) {
  __shared__ UnitRequest u;
  __shared__ float x[kHeadDimMax];
  __shared__ float warp_largest[kHeadDimMax / 32];
  __shared__ int32_t warp_sums[kHeadDimMax / 32];
  const int d = shape.head_dim;
  const int g = blockIdx.x;
  const int j = threadIdx.x;
  TriggerDependents();
  // Asked for together with the request.
  float own = 0;
  if (g < shape.group && j < d) own = requests.q[(int64_t{blockIdx.y} * shape.group + g) * d + j];
  FetchRequest(requests, u);
  const int lane = j % 32;
  const int word = j / 32;
  const int words = shape.tiling.words;
  const bool present = g < shape.group && j < d;
  float y = 0;
  if (present) {
    x[j] = own;
    u.q[g * d + j] = own;
  }
  __syncthreads();
  if (present) y = RotatedCoordinate(u.rotation_transposed, x, d, j);
  ClearUnit(shape, u);
  float largest = WarpMax(fabsf(y));
  if (lane == 0) warp_largest[word] = largest;
  __syncthreads();
  for (int w = 0; w < words; ++w) largest = fmaxf(largest, warp_largest[w]);
  const float step = QueryStep(largest);
  int weight = 0;
  int code = 0;
  if (present && step > 0) {
    const int level = QueryLevel(y, step);
    code = level + 8;
    weight = QueryWeight(level);
  }
  for (int plane = 0; plane < 4; ++plane) {
    const uint32_t bits = __ballot_sync(kFullWarp, code >> plane & 1);
    if (lane == 0) u.query_planes[(g / 4 * 16 + plane * 4 + g % 4) * words + word] = bits;
  }
  const int sum = WarpSum(weight);
  if (lane == 0) warp_sums[word] = sum;
  __syncthreads();
  EndFirst();
  if (j != 0 || g >= shape.group) return;
  int total = 0;
  for (int w = 0; w < words; ++w) total += warp_sums[w];
  u.state->offset[g] = QueryOffset(shape.bits_per_dim, total);
  u.state->coefficient[g] = QueryCoefficient(shape.scale, step, shape.quantiser_step);
}

// hamming: plane r of the number of query heads whose bit is set; row 8 is all
// ones. Grid (1, units). Shared memory: queries and rotated queries [G][d].
__global__ void PrepareHammingKernel(AttendShape shape, PinnedRequests requests) {
  extern __shared__ float memory[];
  __shared__ UnitRequest u;
  __shared__ int32_t missing_sum;
  TriggerDependents();
  FetchRequest(requests, u);
  ClearUnit(shape, u);
  const int d = shape.head_dim;
  const int group = shape.group;
  const int heads = shape.heads_per_code;
  const int words = shape.tiling.words;
  const int lane = threadIdx.x % 32;
  float* x = memory;
  float* rotated = memory + group * d;
  const bool mlp = shape.mlp;
  if (threadIdx.x == 0) missing_sum = 0;
  for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
    x[i] = u.q[i] = requests.q[int64_t{blockIdx.y} * group * d + i];
  }
  __syncthreads();
  if (!mlp) {
    for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
      rotated[i] = RotatedCoordinate(u.rotation_transposed, x + i / d * d, d, i % d);
    }
  }
  __syncthreads();
  for (int base = 0; base < words * 32; base += blockDim.x) {
    const int j = base + threadIdx.x;
    int set = 0;
    if (j < shape.plane_bits) {
      for (int g = 0; g < heads; ++g) {
        if (mlp) {
          set += u.query_codes[g * words + j / 32] >> (j % 32) & 1u;
        } else {
          // As the codes of keys have it: a zero counts as positive.
          set += rotated[g * d + j] >= 0 ? 1 : 0;
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      const bool bit = row < 8 ? (set >> row & 1) != 0 : row == 8 && j < shape.plane_bits;
      const uint32_t bits = __ballot_sync(kFullWarp, bit);
      if (lane == 0 && j / 32 < words) u.query_planes[row * words + j / 32] = bits;
    }
    const int missing = WarpSum(j < shape.plane_bits ? heads - set : 0);
    if (lane == 0) atomicAdd(&missing_sum, missing);
  }
  __syncthreads();
  if (threadIdx.x == 0) u.state->offset[0] = missing_sum;
  EndFirst();
}

}  // namespace spillway::cuda
