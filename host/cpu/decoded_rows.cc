#include "host/cpu/decoded_rows.h"

#include "host/base/int8_rows.h"

namespace spillway {

DecodedRows::DecodedRows(const RowFormat& format) : format_(format) {
  if (format.type == RowType::kElements) return;
  copies_.resize(static_cast<size_t>(kRowBlock * format.element_bytes()));
  for (int i = 0; i < kRowBlock; ++i) pointers_[i] = copies_.data() + i * format.element_bytes();
}

const std::byte* const* DecodedRows::Of(const std::byte* const* rows, const std::byte* const* next,
                                        int count) {
  if (copies_.empty()) return rows;
  const int64_t row_bytes = format_.row_bytes();
  const int64_t bytes = format_.element_bytes();
  for (int i = 0; i < count; ++i) {
    if (next != nullptr) PrefetchRow(next[i], row_bytes);
    std::byte* const to = copies_.data() + i * bytes;
    DecodeInt8Row(format_, rows[i], to, to + bytes / 2);
  }
  return pointers_;
}

DecodedPage::DecodedPage(const LayerRows& rows, int kv_head, int64_t page, int64_t count)
    : rows_(rows.Page(kv_head, page)) {
  if (rows.format().type == RowType::kElements) return;
  const int64_t bytes = rows.format().element_bytes();
  copy_.resize(static_cast<size_t>(count * bytes));
  rows.ReadRows(kv_head, page * kPageTokenCount, 0, count, {copy_.data(), 0, bytes},
                {copy_.data() + bytes / 2, 0, bytes});
  rows_ = copy_.data();
}

}  // namespace spillway
