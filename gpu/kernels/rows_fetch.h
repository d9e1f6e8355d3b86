#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Rows from pinned host memory to tensors in GPU memory.
namespace spillway::cuda {

// row_count rows [K | V] of pages of kPageTokenCount rows: row i goes to k and v,
// 16-byte aligned as all strides are. Fewer than 2^32 pieces of 16 bytes in all.
struct RowsFetch {
  int64_t row_bytes = 0;  // of K and V; a multiple of 32
  uint32_t row_count = 0;
  const std::byte* const* pages = nullptr;  // in GPU memory, of pinned memory
  // Row i is row slots[i] of the pages, in GPU memory; it goes to token i. Null: rows are
  // token_count tokens of every KV head, head_pages pages a head, the first of them
  // row `first` of its page; row i goes to token i % token_count of head i / token_count.
  const uint32_t* slots = nullptr;
  uint32_t token_count = 0;
  uint32_t head_pages = 0;
  uint32_t first = 0;
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  int64_t k_head_stride = 0, k_token_stride = 0;  // bytes
  int64_t v_head_stride = 0, v_token_stride = 0;
};

// Nothing waits.
cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream);

}  // namespace spillway::cuda
