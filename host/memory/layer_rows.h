#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "host/base/limits.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway {

class LayerRecord;

// K or V of one layer in a caller's memory, [H_kv, count, d]: the first element, and the strides of
// heads and tokens in bytes. The elements of a row are contiguous.
struct RowSource {
  const std::byte* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  // A contiguous array in C order. bytes: one row's K or V.
  static RowSource Dense(const void* data, int64_t count, int64_t bytes) {
    return {static_cast<const std::byte*>(data), count * bytes, bytes};
  }
  const std::byte* Row(int kv_head, int64_t token) const {
    return data + kv_head * head_stride + token * token_stride;
  }
};

// The same for memory that rows are copied to.
struct RowTarget {
  std::byte* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  std::byte* Row(int kv_head, int64_t token) const {
    return data + kv_head * head_stride + token * token_stride;
  }
};

// The K/V rows of one (sequence, layer): for each KV head a page table of rows as RowFormat says.
// All devices share them. Writes are not thread-safe. Many threads may read committed rows while no
// write runs.
class LayerRows {
 public:
  // The pages of the pool must hold kPageTokenCount rows of spec.row_bytes().
  LayerRows(PagePool* pool, const ModelSpec& spec);

  // Committed rows, which attends see.
  int64_t token_count() const { return token_count_; }
  int kv_head_count() const { return static_cast<int>(heads_.size()); }
  const RowFormat& format() const { return format_; }
  int64_t row_bytes() const { return row_bytes_; }

  // Makes room for `count` tokens at token_count(). RESOURCE_EXHAUSTED changes nothing visible.
  absl::Status PrepareAppend(int64_t count);
  // Copies tokens [from, to) of K and V, in the dtype of the rows, into prepared rows of one KV
  // head: token t of the source goes to row start + t. If v.data is null, k has the rows
  // themselves, as they are stored. Calls for different (head, range) may run in parallel.
  void WriteRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowSource& k,
                 const RowSource& v);
  // Makes the prepared rows visible: token_count() becomes `token_count`.
  void Commit(int64_t token_count) { token_count_ = token_count; }

  // --- Rows that outlive the process. Without a record nothing happens.

  // Says that the first token_count rows are written, by host or device, and sums those that are
  // not summed yet. They outlive the process from now on. REQUIRES: they are committed.
  void Keep(int64_t token_count);
  // The same where the device has written the length.
  void KeepWritten(int64_t token_count);
  // Address of the word in which a device writes the length itself, as LayerRecord::LengthWord()
  // says. The device knows this memory from RecordFile::Observe(). Null without a record.
  uint64_t* length_word() const;
  // Whether SumRows() may be called for an append at this token.
  bool CanSum(int64_t start) const { return record_ != nullptr && summed_token_count_ == start; }
  // Adds tokens [from, to) of one page and KV head, which were just written, to the checksums:
  // cheaper than later, while the rows are in a cache. Calls for different (head, page) may run in
  // parallel.
  void SumRows(int kv_head, int64_t from, int64_t to);
  // Says that SumRows() was called for all tokens before token_count.
  void SetSummed(int64_t token_count) { summed_token_count_ = token_count; }
  // Sums all rows before token_count that are not summed yet, in parallel.
  void SumUpTo(int64_t token_count);
  // The checksum of a full page.
  uint64_t SumOfPage(int kv_head, int64_t page) const;
  // The sum of rows [page start, token_count) of all KV heads, in the page of token_count.
  uint64_t SumOfOpenRows(int64_t token_count) const;

  // Gives back pages that were prepared and not committed.
  void Rollback();

  void Truncate(int64_t token_count);

  // Describes the committed rows in the record, which is updated from then on. It must have the
  // same number of KV heads and outlive this object. Checksums of full pages are taken from the
  // other record, which may be the same one; null if there are no full pages. RESOURCE_EXHAUSTED
  // changes nothing visible.
  absl::Status Record(LayerRecord* record, const LayerRecord* sums = nullptr);
  // Prepares the first token_count of the record's tokens, whose rows exist; Commit() makes them
  // visible. The record is not updated before Record(). DATA_LOSS. REQUIRES: there are no tokens
  // yet.
  absl::Status Adopt(const LayerRecord& record, int64_t token_count);
  // Cuts rows that were adopted and not committed, and their record.
  void CutAdopted(LayerRecord& record, int64_t token_count);

  // A copy that shares the pages of the first token_count tokens, without a record.
  LayerRows Share(int64_t token_count) const;

  // First row of page `page` of a KV head. Its rows are row_bytes() apart.
  const std::byte* Page(int kv_head, int64_t page) const { return heads_[kv_head].Page(page); }
  const std::byte* Row(int kv_head, int64_t token) const {
    return Page(kv_head, token / kPageTokenCount) + (token % kPageTokenCount) * row_bytes_;
  }
  // PageRef::index of a page.
  uint32_t PageIndex(int kv_head, int64_t page) const { return heads_[kv_head].ref(page).index; }
  // Number of rows from `token` on, at most `count`, that are contiguous in memory.
  int64_t AdjacentRows(int kv_head, int64_t token, int64_t count) const;
  // PagePool::BytesToExtentEnd() of a row.
  int64_t BytesToExtentEnd(const std::byte* row) const { return pool_->BytesToExtentEnd(row); }
  // Copies tokens [from, to) of one KV head: token start + t goes to row t of k and v. The opposite
  // of WriteRows, also if v.data is null. Calls for different (head, range) may run in parallel.
  void ReadRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowTarget& k,
                const RowTarget& v) const;
  // The same for one row.
  void ReadRow(int kv_head, int64_t token, std::byte* k, std::byte* v) const;
  // Whether WriteRows() of tokens [start, start + count) would change nothing.
  bool Equals(int64_t start, int64_t count, const RowSource& k, const RowSource& v) const;
  int64_t bytes() const;

 private:
  LayerRows(PagePool* pool, const RowFormat& format)
      : pool_(pool), format_(format), row_bytes_(format.row_bytes()) {}

  // A row of the source, as it is stored.
  void StoreRow(const std::byte* k, const std::byte* v, std::byte* row) const;

  // The sum of rows [from, to) of one page and KV head, to which others can be added.
  uint64_t SumOfRows(int kv_head, int64_t from, int64_t to) const;
  // The same of the open page of token_count, as SumRows() left it in the record.
  uint64_t NotedOpenSum(int64_t token_count) const;
  // Shortens the record to token_count, and the sums.
  void CutRecord(int64_t token_count);

  PagePool* pool_;
  RowFormat format_;
  int64_t row_bytes_;  // of a stored row
  int64_t token_count_ = 0;
  std::vector<PageTable> heads_;
  LayerRecord* record_ = nullptr;
  // The record has sums of all full pages before this token. For its open page, the record's entry
  // of each KV head has the sum of the rows before this token.
  int64_t summed_token_count_ = 0;
};

}  // namespace spillway
