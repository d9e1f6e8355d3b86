#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/exp.h"

// Query heads as the bit planes that tensor cores multiply with codes.
namespace spillway::cuda {

// Quantiser steps of B bits for a standard normal coordinate (Max 1960).
__device__ inline float DeviceQuantiserStep(int bits) {
  return bits == 1 ? 1.596f : bits == 2 ? 0.9957f : bits == 3 ? 0.586f : 0.3352f;
}

// One block a unit; blockDim.x is a multiple of 32, at least the padded
// dimensions. Shared memory: rotated [G][d] floats.
__global__ void PrepareQueryKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ float rotated[];
  __shared__ int32_t weight_sum[kGroupMax];
  __shared__ float step_size[kGroupMax];
  const UnitRequest& u = units[blockIdx.x];
  UnitState& state = *u.state;
  const int d = shape.head_dim;
  const int group = shape.group;
  const int words = shape.tiling.words;
  const int lane = threadIdx.x % 32;

  for (int i = threadIdx.x; i < shape.bin_count; i += blockDim.x) u.histogram[i] = 0;
  if (u.by_mass) {
    for (int i = threadIdx.x; i < group * kScoreBinCount; i += blockDim.x) u.head_histograms[i] = 0;
    for (int64_t i = threadIdx.x; i < group * u.chunks(); i += blockDim.x) u.head_ties[i] = 0;
  }
  if (threadIdx.x == 0) {
    state.error_token = kNoToken;
    state.heavy_count = 0;
    state.limited = 0;
  }
  if (threadIdx.x < kGroupMax) {
    state.reference[threadIdx.x] = INT32_MIN;
    state.mass[threadIdx.x] = 0;
    weight_sum[threadIdx.x] = 0;
  }
  if (shape.selector == Selector::kOracle) return;

  const bool mlp = shape.query_codes != nullptr;
  if (!mlp) {
    for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
      const int j = i % d;
      const float* q = u.q + i / d * d;
      float y = 0;
#pragma unroll 16
      for (int k = 0; k < d; ++k) y = fmaf(shape.rotation_transposed[k * d + j], q[k], y);
      rotated[i] = y;
    }
    __syncthreads();
  }

  if (shape.selector == Selector::kHamming) {
    // Plane r of the number of query heads whose bit is set; row 8 is all ones.
    for (int base = 0; base < words * 32; base += blockDim.x) {
      const int j = base + threadIdx.x;
      int set = 0;
      if (j < shape.hash_bits) {
        for (int g = 0; g < group; ++g) {
          if (mlp) {
            const uint32_t* code =
                shape.query_codes + (static_cast<int64_t>(blockIdx.x) * group + g) * words;
            set += code[j / 32] >> (j % 32) & 1u;
          } else {
            // As the codes of keys have it: a zero counts as positive.
            set += rotated[g * d + j] >= 0 ? 1 : 0;
          }
        }
      }
      for (int row = 0; row < 16; ++row) {
        const bool bit = row < 8 ? (set >> row & 1) != 0 : row == 8 && j < shape.hash_bits;
        const uint32_t word = __ballot_sync(kFullWarp, bit);
        if (lane == 0 && j / 32 < words) u.query_planes[row * words + j / 32] = word;
      }
      // sum_j (G - c_j), one atomic a warp.
      const int missing = WarpSum(j < shape.hash_bits ? group - set : 0);
      if (lane == 0) atomicAdd(&weight_sum[0], missing);
    }
    __syncthreads();
    if (threadIdx.x == 0) state.offset[0] = weight_sum[0];
    return;
  }

  // asymmetric: w = clamp(rne(y / s - 1/2), -8, 7), stored as w + 8 in planes;
  // row = plane * 4 + head of the tile.
  for (int g = threadIdx.x / 32; g < group; g += blockDim.x / 32) {
    float largest = 0;
    for (int j = lane; j < d; j += 32) largest = fmaxf(largest, fabsf(rotated[g * d + j]));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    }
    if (lane == 0) step_size[g] = __fdiv_rn(largest, 7.5f);
  }
  __syncthreads();
  const int tiles = (group + 3) / 4;
  for (int i = threadIdx.x / 32; i < tiles * 4 * words; i += blockDim.x / 32) {
    const int g = i / words;
    const int word = i % words;
    const int j = word * 32 + lane;
    int weight = 0;
    int code = 0;
    if (g < group && j < d) {
      const float s = step_size[g];
      if (s > 0) {
        const float w = fminf(fmaxf(rintf(__fdiv_rn(rotated[g * d + j], s) - 0.5f), -8.0f), 7.0f);
        code = static_cast<int>(w) + 8;
        weight = 2 * static_cast<int>(w) + 1;
      }
    }
    const int sum = WarpSum(weight);
    for (int plane = 0; plane < 4; ++plane) {
      const uint32_t bits = __ballot_sync(kFullWarp, code >> plane & 1);
      if (lane == 0) {
        u.query_planes[(g / 4 * 16 + plane * 4 + g % 4) * words + word] = bits;
      }
    }
    if (lane == 0 && g < group) atomicAdd(&weight_sum[g], sum);
  }
  __syncthreads();
  if (threadIdx.x < group) {
    const int g = threadIdx.x;
    const float s = step_size[g];
    const int levels_minus_1 = (1 << shape.bits_per_dim) - 1;
    // A query of zeros has no planes: its sums count for nothing.
    state.offset[g] = s > 0 ? -levels_minus_1 * weight_sum[g] : 0;
    const float scale = shape.scale * kExpLog2E;
    state.coefficient[g] =
        fminf(scale * (s * (DeviceQuantiserStep(shape.bits_per_dim) * 0.25f)), 1.0e30f);
  }
}

}  // namespace spillway::cuda
