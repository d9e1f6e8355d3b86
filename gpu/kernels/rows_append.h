#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/resident.h"
#include "host/base/row_format.h"

// Long appends with K and V in GPU memory.
namespace spillway::cuda {

inline constexpr int kRowsAppendHeads = 32;  // at most, per launch

// Tokens [begin, end) of KV heads [0, head_count), fewer than 2^31 rows. Tokens from `start` on are
// new: they come from k and v, whose first token is `start`. Earlier ones are in their pages.
struct RowsAppend {
  DType dtype = DType::kBF16;
  int32_t head_count = 0;
  int32_t first_head = 0;  // added to the head in BadRow
  RowType row_type = RowType::kElements;
  int32_t head_dim = 0;
  int64_t row_bytes = 0;  // of a stored row
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
  bool writes_pages = true;  // else the copy engine writes the new rows to their pages, as they are
  // A copy of [begin, end) on the GPU; begin must be the start of a page. Page p of head h, counted
  // from begin, is at row (h * stage_pages + p) * kPageTokenCount. Null: no copy.
  std::byte* stage = nullptr;
  int64_t stage_pages = 0;
  // Rows that the GPU keeps; those of tokens from recent_begin on also go to the ring.
  ResidentRows resident[kRowsAppendHeads] = {};
  int64_t recent_begin = 0;
  // The smallest BadRow of the elements that are not finite.
  unsigned long long* bad = nullptr;
};

// BadRow: the place of an element, ordered by token, KV head, K (0) or V (1), element.
SPILLWAY_HOST_DEVICE inline unsigned long long MakeBadRow(int64_t token, int64_t head, int value,
                                                          int element) {
  return ((static_cast<unsigned long long>(token) * 1024 + static_cast<unsigned>(head)) * 2 +
          static_cast<unsigned>(value)) *
             512 +
         static_cast<unsigned>(element);
}
inline constexpr unsigned long long kNoBadRow = ~0ull;

// Does not wait for the GPU. If a new element is not finite, the 16 bytes that contain it are
// written as 0.
cudaError_t LaunchRowsAppend(const RowsAppend& append, cudaStream_t stream);

}  // namespace spillway::cuda
