#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/kernels.h"
#include "host/memory/layer_rows.h"

namespace spillway {

// The rows of a block in the model's dtype, as kernels read them: the rows themselves, or decoded
// copies of rows of 8 bits.
class DecodedRows {
 public:
  explicit DecodedRows(const RowFormat& format);
  // `count` <= kRowBlock rows in the dtype. Copies stay until the next call. next: rows of the next
  // block, at least `count`, which are prefetched if these are copied; may be null.
  const std::byte* const* Of(const std::byte* const* rows, const std::byte* const* next, int count);
  // What kernels are to prefetch of the next block.
  const std::byte* const* Ahead(const std::byte* const* next) const {
    return copies_.empty() ? next : nullptr;
  }

 private:
  const RowFormat format_;
  std::vector<std::byte> copies_;  // empty: rows are used as they are
  const std::byte* pointers_[kRowBlock];
};

// The first `count` rows of a page in the model's dtype, element_row_bytes() apart: the page
// itself, or a decoded copy.
class DecodedPage {
 public:
  DecodedPage(const LayerRows& rows, int kv_head, int64_t page, int64_t count = kPageTokenCount);
  const std::byte* rows() const { return rows_; }

 private:
  std::vector<std::byte> copy_;
  const std::byte* rows_;
};

}  // namespace spillway
