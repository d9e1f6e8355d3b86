#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/attend.h"

// Long appends whose K and V lie in GPU memory.
namespace spillway::cuda {

inline constexpr int kRowsAppendHeads = 32;  // of one launch

// Tokens [begin, end) of KV heads [0, head_count), fewer than 2^31 rows: from `start` on they are
// new, of the tensors, whose first token is `start`; those before are in their pages.
struct RowsAppend {
  DType dtype = DType::kBF16;
  int32_t head_count = 0;
  int32_t first_head = 0;  // in messages
  int64_t row_bytes = 0;
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  int64_t k_head_stride = 0, k_token_stride = 0;  // bytes
  int64_t v_head_stride = 0, v_token_stride = 0;
  int64_t start = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // Page p of head h: row_pages[h * row_page_capacity + p], pinned.
  const std::byte* const* row_pages = nullptr;
  int64_t row_page_capacity = 0;
  // A copy on the GPU of [begin, end), begin on a page's edge: page p of head h from
  // there on at (h * stage_pages + p) * kPageTokenCount rows. Null: none.
  std::byte* stage = nullptr;
  int64_t stage_pages = 0;
  // Rows that the GPU holds; those of tokens from recent_begin on go to the ring too.
  ResidentRows resident[kRowsAppendHeads] = {};
  int64_t recent_begin = 0;
  // The smallest BadRow of what is not finite.
  unsigned long long* bad = nullptr;
};

// Token, KV head, K (0) or V (1), element: in this order.
SPILLWAY_HOST_DEVICE inline unsigned long long MakeBadRow(int64_t token, int64_t head, int value,
                                                          int element) {
  return ((static_cast<unsigned long long>(token) * 1024 + static_cast<unsigned>(head)) * 2 +
          static_cast<unsigned>(value)) *
             512 +
         static_cast<unsigned>(element);
}
inline constexpr unsigned long long kNoBadRow = ~0ull;

// Nothing waits. An element that is not finite is written as 0, with those beside it.
cudaError_t LaunchRowsAppend(const RowsAppend& append, cudaStream_t stream);

}  // namespace spillway::cuda
