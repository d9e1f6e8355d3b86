#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Rows from pinned host memory to tensors in GPU memory.
namespace spillway::cuda {

// Where rows [K | V] go: 16-byte aligned, as all strides are.
struct FetchTarget {
  int64_t row_bytes = 0;  // of K and V; a multiple of 32
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  int64_t k_head_stride = 0, k_token_stride = 0;  // bytes
  int64_t v_head_stride = 0, v_token_stride = 0;
};

// Chosen rows of pages of kPageTokenCount rows.
struct RowsFetch {
  FetchTarget to;
  uint32_t row_count = 0;
  const std::byte* const* pages = nullptr;  // in GPU memory, of pinned memory
  // Row i is row slots[i] of the pages, in GPU memory; it goes to token i.
  const uint32_t* slots = nullptr;
};

// Ranges of rows, each within a page. The list is the launch's own: nothing is
// uploaded, so that launches follow one another closely.
struct PagesFetch {
  static constexpr uint32_t kPieceCountMax = 224;
  struct Piece {
    const std::byte* rows = nullptr;  // the first of them, in pinned memory
    uint32_t token = 0;               // it goes to this one,
    uint16_t head = 0;                // of this KV head
    uint16_t count = 0;               // at most kPageTokenCount
  };

  FetchTarget to;
  uint32_t piece_count = 0;
  Piece pieces[kPieceCountMax] = {};
};
// What a kernel's parameters may take on every GPU.
static_assert(sizeof(PagesFetch) <= 4096);

// Nothing waits. Fewer than 2^32 pieces of 16 bytes in all.
cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream);
cudaError_t LaunchPagesFetch(const PagesFetch& fetch, cudaStream_t stream);

}  // namespace spillway::cuda
