#pragma once

#include <cuda_bf16.h>

#include "gpu/kernels/matrix_columns.cuh"
#include "gpu/kernels/quantiser.cuh"

// The centre, the encoder of few keys, and the rotation of queries.
namespace spillway::cuda {

__device__ inline float Widen(float x) { return x; }
__device__ inline float Widen(__half x) { return __half2float(x); }
__device__ inline float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// A thread a dimension, blockIdx.y the KV head.
template <typename T>
__global__ void CentreKernel(EncodeWork work, int64_t token_count) {
  // Rows may lie in host memory, a microsecond or two away.
  constexpr int kLoads = 32;
  static_assert(kPageTokenCount % kLoads == 0);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= work.head_dim) return;
  const int head = blockIdx.y;
  const std::byte* const* pages = work.row_pages + head * work.row_page_capacity;
  double sum = 0;
  for (int64_t first = 0; first < token_count; first += kLoads) {
    const int count = static_cast<int>(min(token_count - first, int64_t{kLoads}));
    const std::byte* row = RowAddress(pages, work.row_bytes, first) + i * sizeof(T);
    T key[kLoads];
#pragma unroll
    for (int t = 0; t < kLoads; ++t) {
      if (t < count) key[t] = __ldcs(reinterpret_cast<const T*>(row + t * work.row_bytes));
    }
#pragma unroll
    for (int t = 0; t < kLoads; ++t) {
      if (t < count) sum += Widen(key[t]);
    }
  }
  work.centre[head * work.head_dim + i] =
      static_cast<float>(sum / static_cast<double>(token_count));
}

// Element j of P x: column j of P^T and x [d], in shared memory.
using RotationColumn = MatrixColumns<1, 64>;
__device__ inline float Rotated(RotationColumn& column, const float* x, int dim) {
  float y[1][1] = {};
  column.MultiplyAdd(x, dim, y);
  return y[0][0];
}

__device__ inline float LoadElement(DType dtype, const std::byte* row, int i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(row)[i];
  if (dtype == DType::kF16) return __half2float(reinterpret_cast<const __half*>(row)[i]);
  return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(row)[i]);
}

// A block a key, a thread a dimension: blockIdx.x token from work.begin on,
// blockIdx.y KV head. blockDim.x is d, rounded up to whole warps.
__global__ void __launch_bounds__(256)
    EncodeTokenKernel(EncodeWork work, const float* transposed, Quantiser quantiser) {
  __shared__ float4 x4[64];
  __shared__ float4 y4[64];
  __shared__ float4 t4[64];
  __shared__ uint32_t warp_largest[8];
  __shared__ float inverse;
  float* x = reinterpret_cast<float*>(x4);
  const int dim = work.head_dim;
  const int j = threadIdx.x;
  const bool inside = j < dim;
  const int head = blockIdx.y;
  const int64_t token = work.begin + blockIdx.x;
  const std::byte* row =
      RowAddress(work.row_pages + head * work.row_page_capacity, work.row_bytes, token);
  // Asked for before the key: its page's address is on its way.
  RotationColumn column(transposed, dim, dim, j, 0);
  const float difference =
      inside ? LoadElement(work.dtype, row, j) - work.centre[head * dim + j] : 0.0f;

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
  std::byte* page = CodePage(work, head, token);
  const int slot = static_cast<int>(token % kPageTokenCount);
  const uint32_t code = inside ? quantiser.Code(y) : 0;
  for (int plane = 0; plane < work.tiling.planes; ++plane) {
    const uint32_t word = __ballot_sync(kFullWarp, code >> plane & 1);
    if (j % 32 == 0) {
      reinterpret_cast<uint32_t*>(page)[work.tiling.word_offset(plane, slot, j / 32)] = word;
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
  StoreFactor(work, head, token, Factor(length, dot, quantiser.step));
}

// A block a vector, a thread a dimension, rounded up to whole warps.
__global__ void __launch_bounds__(256)
    RotateKernel(const float* transposed, int dim, const float* x, float* y) {
  __shared__ float4 x4[64];
  const int j = threadIdx.x;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * dim;
  RotationColumn column(transposed, dim, dim, j, 0);
  if (j < dim) reinterpret_cast<float*>(x4)[j] = x[base + j];
  __syncthreads();
  const float rotated = Rotated(column, reinterpret_cast<const float*>(x4), dim);
  if (j < dim) y[base + j] = rotated;
}

}  // namespace spillway::cuda
