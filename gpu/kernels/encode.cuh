#pragma once

#include <cuda_bf16.h>

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/encode.h"

// Computes the centre of a layer's keys.
namespace spillway::cuda {

__device__ inline float Widen(float x) { return x; }
__device__ inline float Widen(__half x) { return __half2float(x); }
__device__ inline float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// One thread per dimension; blockIdx.y is the KV head.
template <typename T>
__global__ void CentreKernel(EncodeWork work, int64_t token_count) {
  // In flight: rows may be in host memory, one or two microseconds away.
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

}  // namespace spillway::cuda
