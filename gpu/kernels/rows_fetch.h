#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "host/base/row_format.h"

// Copies rows from pinned host memory to tensors in GPU memory.
namespace spillway::cuda {

// Where rows [K | V] go, in the model's dtype. Addresses and strides are multiples of 16 bytes.
struct FetchTarget {
  RowFormat format;
  int64_t row_bytes = 0;  // of a stored row; a multiple of 16
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  int64_t k_head_stride = 0, k_token_stride = 0;  // bytes
  int64_t v_head_stride = 0, v_token_stride = 0;
};

// Single rows, from pages of kPageTokenCount rows.
struct RowsFetch {
  FetchTarget to;
  uint32_t row_count = 0;
  const std::byte* const* pages = nullptr;  // table in GPU memory; the pages are pinned
  // In GPU memory. Row slots[i] of the pages goes to token i.
  const uint32_t* slots = nullptr;
};

// Ranges of rows, each within a page. The list is a parameter of the launch: nothing is uploaded,
// so that launches follow one another closely.
struct PagesFetch {
  static constexpr uint32_t kPieceCountMax = 224;
  struct Piece {
    const std::byte* rows = nullptr;  // first row, in pinned memory
    uint32_t token = 0;               // token that the first row goes to
    uint16_t head = 0;                // KV head that the rows go to
    uint16_t count = 0;               // rows, at most kPageTokenCount
  };

  FetchTarget to;
  uint32_t piece_count = 0;
  Piece pieces[kPieceCountMax] = {};
};
// Limit of a kernel's parameters that holds on every GPU.
static_assert(sizeof(PagesFetch) <= 4096);

// These do not wait for the GPU. REQUIRES: fewer than 2^32 pieces of 16 bytes in all.
cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream);
cudaError_t LaunchPagesFetch(const PagesFetch& fetch, cudaStream_t stream);

}  // namespace spillway::cuda
