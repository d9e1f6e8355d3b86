#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/code_tiling.h"
#include "host/base/row_format.h"
#include "host/core/page_index.h"

namespace spillway::cuda {

// Keys of one (sequence, layer) to encode: tokens [begin, end) of every KV
// head. All pointers are device addresses; row pages lie in pinned host
// memory or on the GPU.
struct EncodeWork {
  DType dtype = DType::kBF16;
  RowType row_type = RowType::kElements;
  int head_dim = 0;       // d, a multiple of 16 in [16, 256]
  int kv_head_count = 0;  // H
  int64_t row_bytes = 0;  // of a stored row
  int64_t begin = 0;
  int64_t end = 0;
  // Page p of KV head h: row_pages[h * row_page_capacity + p], rows as format() says.
  const std::byte* const* row_pages = nullptr;
  int64_t row_page_capacity = 0;
  std::byte* const* code_pages = nullptr;  // likewise
  int64_t code_page_capacity = 0;
  CodeTiling tiling;
  float* centre = nullptr;  // [H][d], for the codes of methods; null without any

  SPILLWAY_HOST_DEVICE RowFormat format() const { return {dtype, row_type, head_dim}; }
};

struct RotationWeights {
  int bits_per_dim = 0;               // B in [1, 4]
  bool raw_keys = false;              // whether the pages' centres are 0
  const float* transposed = nullptr;  // P^T [d][d]
};

// What the norms of each KV head are relative to; see host/core/page_index.h.
// Device addresses.
struct HeadIndex {
  HeadStatistics* statistics = nullptr;  // [H]
  float* value_centres = nullptr;        // [H][d], the first value centres
};

// Launchers; they do not wait. LaunchCentre sets work.centre to the mean of each head's first
// token_count keys, summed in fp64 in token order and rounded once.
cudaError_t LaunchCentre(const EncodeWork& work, int64_t token_count, cudaStream_t stream);

// Computes centres, codes, factors and norms of closed pages, bit-equal to those of the CPU device.
// REQUIRES: work.begin and work.end are multiples of kPageTokenCount, and `heads` is filled.
cudaError_t LaunchEncodePages(const EncodeWork& work, const RotationWeights& weights,
                              const HeadIndex& heads, cudaStream_t stream);
// The same for a sequence's first kCentreTokenCount tokens; begin and end are not read, `heads` is
// filled. scratch: device memory for at least one head, FirstPagesScratchBytes() each; as many
// heads as fit are encoded at a time.
cudaError_t LaunchEncodeFirstPages(const EncodeWork& work, const RotationWeights& weights,
                                   const HeadIndex& heads, std::byte* scratch,
                                   int64_t scratch_bytes, cudaStream_t stream);
constexpr int64_t FirstPagesScratchBytes(int head_dim) {
  return static_cast<int64_t>(sizeof(float)) *
         (2 * kCentreTokenCount + int64_t{kFirstPageCount} * head_dim);
}

}  // namespace spillway::cuda
