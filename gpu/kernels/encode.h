#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/code_tiling.h"

namespace spillway::cuda {

// Keys of one (sequence, layer) to encode: tokens [begin, end) of every KV
// head. All pointers are device addresses; row pages lie in pinned host
// memory or on the GPU.
struct EncodeWork {
  DType dtype = DType::kBF16;
  int head_dim = 0;       // d, a multiple of 16 in [16, 256]
  int kv_head_count = 0;  // H
  int64_t row_bytes = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // Page p of KV head h: row_pages[h * row_page_capacity + p], rows [K | V].
  const std::byte* const* row_pages = nullptr;
  int64_t row_page_capacity = 0;
  std::byte* const* code_pages = nullptr;  // likewise
  int64_t code_page_capacity = 0;
  CodeTiling tiling;
  float* centre = nullptr;  // [H][d]
};

struct RotationWeights {
  int bits_per_dim = 0;               // B in [1, 4]
  const float* transposed = nullptr;  // P^T [d][d]
};

// Launchers; nothing waits. centre: the mean of each head's first token_count
// keys, summed in fp64 in token order and rounded once.
cudaError_t LaunchCentre(const EncodeWork& work, int64_t token_count, cudaStream_t stream);
// Codes and factors, bit-equal to the CPU device's.
cudaError_t LaunchEncodeRotation(const EncodeWork& work, const RotationWeights& weights,
                                 cudaStream_t stream);

}  // namespace spillway::cuda
