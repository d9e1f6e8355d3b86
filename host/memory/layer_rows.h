#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "host/base/limits.h"
#include "host/memory/layer_record.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway {

// K or V of one layer that a caller has, [H_kv, count, d]: where its first
// element is, and how far apart heads and tokens are, bytes. The elements of a
// row lie side by side.
struct RowSource {
  const std::byte* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  // In C order. bytes: of one row's K or V.
  static RowSource Dense(const void* data, int64_t count, int64_t bytes) {
    return {static_cast<const std::byte*>(data), count * bytes, bytes};
  }
  const std::byte* Row(int kv_head, int64_t token) const {
    return data + kv_head * head_stride + token * token_stride;
  }
};

// The same of memory that rows are copied to.
struct RowTarget {
  std::byte* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  std::byte* Row(int kv_head, int64_t token) const {
    return data + kv_head * head_stride + token * token_stride;
  }
};

// The K/V rows of one (sequence, layer): per KV head a page table of rows
// [K(d) | V(d)]. Shared by all devices. Not thread-safe for writes; reads of
// committed rows from many threads are safe while no write runs.
class LayerRows {
 public:
  // pool's pages hold kPageTokenCount rows of spec.row_bytes().
  LayerRows(PagePool* pool, const ModelSpec& spec);

  // Rows that are committed: visible to attends.
  int64_t token_count() const { return token_count_; }
  int kv_head_count() const { return static_cast<int>(heads_.size()); }
  int64_t row_bytes() const { return row_bytes_; }

  // Makes room for count tokens at token_count(). RESOURCE_EXHAUSTED changes
  // nothing that can be seen.
  absl::Status PrepareAppend(int64_t count);
  // Copies tokens [from, to) of K and V, in the row's dtype, into the rows of
  // one KV head, prepared before: token t of the source goes to row start + t.
  // Different (head, range) may run in parallel.
  void WriteRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowSource& k,
                 const RowSource& v);
  // Makes the prepared rows visible: token_count() becomes `token_count`.
  void Commit(int64_t token_count) { token_count_ = token_count; }
  // The first token_count rows are written, whoever wrote them: they outlive the process from
  // now on, where there is a record. REQUIRES: they are committed.
  void Keep(int64_t token_count) {
    if (record_ != nullptr) record_->SetTokenCount(token_count);
  }
  // The word that Keep() writes, for a device that writes it itself: in memory that the device was
  // told of (RecordFile::Observe). Null: there is no record.
  uint64_t* length_word() const { return record_ == nullptr ? nullptr : record_->length_word(); }
  // Gives back what was prepared and not committed.
  void Rollback();

  void Truncate(int64_t token_count);

  // Keeps what is committed in the record, which follows from now on. It is of the same KV heads
  // and outlives this. RESOURCE_EXHAUSTED changes nothing that can be seen.
  absl::Status Record(LayerRecord* record);
  // Prepares the record's tokens, whose rows are there: Commit() makes them visible. The record
  // stays as it is until it follows. DATA_LOSS. REQUIRES: there are none yet.
  absl::Status Adopt(const LayerRecord& record);

  // Not recorded.
  LayerRows Share(int64_t token_count) const;

  // First row of page `page` of a KV head; rows follow at row_bytes().
  const std::byte* Page(int kv_head, int64_t page) const { return heads_[kv_head].Page(page); }
  const std::byte* Row(int kv_head, int64_t token) const {
    return Page(kv_head, token / kPageTokenCount) + (token % kPageTokenCount) * row_bytes_;
  }
  // Rows from `token` on, at most `count`, that lie one after the other in memory.
  int64_t AdjacentRows(int kv_head, int64_t token, int64_t count) const;
  // As of PagePool, of a row's memory.
  int64_t BytesToExtentEnd(const std::byte* row) const { return pool_->BytesToExtentEnd(row); }
  // Copies tokens [from, to) of one KV head: token start + t goes to row t of k
  // and of v. The opposite of WriteRows; different (head, range) may run in parallel.
  void ReadRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowTarget& k,
                const RowTarget& v) const;
  // Whether tokens [start, start + count) hold exactly these bytes.
  bool Equals(int64_t start, int64_t count, const RowSource& k, const RowSource& v) const;
  int64_t bytes() const;

 private:
  LayerRows(PagePool* pool, int64_t row_bytes) : pool_(pool), row_bytes_(row_bytes) {}

  PagePool* pool_;
  int64_t row_bytes_;
  int64_t token_count_ = 0;
  std::vector<PageTable> heads_;
  LayerRecord* record_ = nullptr;
};

}  // namespace spillway
