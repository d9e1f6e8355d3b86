#pragma once

#include "gpu/kernels/append.h"
#include "gpu/kernels/matrix_columns.cuh"
#include "gpu/kernels/quantiser.cuh"

// Kernels of what a step appends.
namespace spillway::cuda {

// Element j of P x: column j of P^T and x [d], in shared memory.
using RotationColumn = MatrixColumns<1, 64>;
__device__ inline float Rotated(RotationColumn& column, const float* x, int dim) {
  float y[1][1] = {};
  column.MultiplyAdd(x, dim, y);
  return y[0][0];
}

// Key blockIdx.x of the append, a thread a dimension: blockDim.x is d, rounded
// up to whole warps.
__device__ inline void EncodeKey(const StepAppend& append, const Quantiser& quantiser) {
  __shared__ float4 x4[64];
  __shared__ float4 y4[64];
  __shared__ float4 t4[64];
  __shared__ uint32_t warp_largest[8];
  __shared__ float inverse;
  float* x = reinterpret_cast<float*>(x4);
  const int dim = append.head_dim;
  const int j = threadIdx.x;
  const bool inside = j < dim;
  const AppendedKey key = append.keys[blockIdx.x];
  const float difference = inside ? LoadElement(append.dtype, key.row, j) - key.centre[j] : 0.0f;
  RotationColumn column(key.transposed, dim, dim, j, 0);

  // Floats that are not negative order as their bits do.
  const uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(fabsf(difference)));
  if (j % 32 == 0) warp_largest[j / 32] = of_warp;
  __syncthreads();
  float largest = 0;
  for (int w = 0; w * 32 < dim; ++w) largest = fmaxf(largest, __uint_as_float(warp_largest[w]));
  const float r = __fdiv_rn(difference, Divisor(largest));
  x[j] = r;
  __syncthreads();
  float length = 0;
  if (j == 0) {
    float norm_sq = 0;
#pragma unroll 4
    for (int i = 0; i < dim / 4; ++i) {
      const float4 v = x4[i];
      norm_sq = fmaf(v.x, v.x, norm_sq);
      norm_sq = fmaf(v.y, v.y, norm_sq);
      norm_sq = fmaf(v.z, v.z, norm_sq);
      norm_sq = fmaf(v.w, v.w, norm_sq);
    }
    const float norm = __fsqrt_rn(largest > 0 ? norm_sq : 1.0f);
    length = largest * norm;
    inverse = __fdiv_rn(1.0f, norm);
  }
  __syncthreads();
  x[j] = r * inverse;
  __syncthreads();

  const float y = Rotated(column, x, dim);
  reinterpret_cast<float*>(y4)[j] = y;
  reinterpret_cast<float*>(t4)[j] = quantiser.Centred(y);
  const int slot = static_cast<int>(key.slot);
  const uint32_t code = inside ? quantiser.Code(y) : 0;
  for (int plane = 0; plane < append.tiling.planes; ++plane) {
    const uint32_t word = __ballot_sync(kFullWarp, code >> plane & 1);
    if (j % 32 == 0) {
      reinterpret_cast<uint32_t*>(key.code_page)[append.tiling.word_offset(plane, slot, j / 32)] =
          word;
    }
  }
  __syncthreads();
  if (j > 0) return;
  float dot = 0;
#pragma unroll 4
  for (int i = 0; i < dim / 4; ++i) {
    const float4 v = y4[i];
    const float4 t = t4[i];
    dot = fmaf(v.x, t.x, dot);
    dot = fmaf(v.y, t.y, dot);
    dot = fmaf(v.z, t.z, dot);
    dot = fmaf(v.w, t.w, dot);
  }
  StoreFactor(append.tiling, key.code_page, slot, Factor(length, dot, quantiser.step));
}

// A warp a row.
__device__ inline void CopyRows(const RowCopy* copies, int64_t count, int64_t row_bytes,
                                int64_t warp, int64_t warps) {
  for (int64_t i = warp; i < count; i += warps) {
    const RowCopy copy = copies[i];
    for (int j = threadIdx.x % 32; j < row_bytes / 16; j += 32) {
      reinterpret_cast<uint4*>(copy.to)[j] = reinterpret_cast<const uint4*>(copy.from)[j];
    }
  }
}

__device__ inline void UpdateTables(const TableUpdate* updates, int64_t count, int64_t thread,
                                    int64_t threads) {
  for (int64_t i = thread; i < count; i += threads) {
    const TableUpdate update = updates[i];
    *update.slot = update.value;
  }
}

// A block a key, then copy_blocks that copy rows and one that updates tables.
__global__ void __launch_bounds__(256)
    StepAppendKernel(StepAppend append, Quantiser quantiser, int copy_blocks) {
  TriggerDependents();
  const int block = static_cast<int>(blockIdx.x) - append.key_count;
  if (block < 0) {
    EncodeKey(append, quantiser);
  } else if (block < copy_blocks) {
    const int warps = blockDim.x / 32;
    CopyRows(append.copies, append.counts->copy_count, append.row_bytes,
             block * warps + threadIdx.x / 32, copy_blocks * warps);
  } else {
    UpdateTables(append.updates, append.counts->update_count, threadIdx.x, blockDim.x);
  }
}

__global__ void RowCopyKernel(const RowCopy* copies, int64_t count, int64_t row_bytes) {
  const int warps = blockDim.x / 32;
  CopyRows(copies, count, row_bytes, int64_t{blockIdx.x} * warps + threadIdx.x / 32,
           int64_t{gridDim.x} * warps);
}

__global__ void TableUpdateKernel(const TableUpdate* updates, int64_t count) {
  UpdateTables(updates, count, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
               int64_t{gridDim.x} * blockDim.x);
}

}  // namespace spillway::cuda
