#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/record_file.h"

namespace spillway {

// The data of one (sequence, layer) that outlive the process: which pages hold its rows, and the
// number of committed rows. This number is one 64-bit word, written after the rows and before any
// caller learns of them; page entries beyond it mean nothing. Not thread-safe, but other threads
// may read the word.
class LayerRecord {
 public:
  // A new record with no tokens. RESOURCE_EXHAUSTED.
  static absl::StatusOr<LayerRecord> Create(RecordFile* file, int kv_head_count);
  // As an earlier process left it. DATA_LOSS if it is inconsistent.
  static absl::StatusOr<LayerRecord> Open(RecordFile* file, RecordIndex first, int kv_head_count,
                                          int64_t page_token_count);
  LayerRecord(LayerRecord&&) = default;
  LayerRecord& operator=(LayerRecord&&) = delete;

  RecordIndex first() const { return parts_.front(); }
  // The first record of the next layer; 0: this is the last layer.
  RecordIndex next_layer() const;
  void SetNextLayer(RecordIndex next);

  int64_t token_count() const {
    return static_cast<int64_t>(Length().load(std::memory_order_acquire));
  }
  // A thread or process that sees the new count also sees all earlier writes.
  void SetTokenCount(int64_t count) {
    Length().store(static_cast<uint64_t>(count), std::memory_order_release);
  }

  // Address of the word, for a device that writes it. The address never changes.
  uint64_t* length_word() const;

  // Makes room for page_count pages of each KV head. RESOURCE_EXHAUSTED changes nothing visible.
  absl::Status Reserve(int64_t page_count);
  // PageRef::index of page `page` of a KV head. REQUIRES: Reserve() made room for it.
  uint32_t PageIndex(int kv_head, int64_t page) const {
    return Entry(kv_head, page).load(std::memory_order_relaxed);
  }
  void SetPageIndex(int kv_head, int64_t page, uint32_t index) {
    Entry(kv_head, page).store(index, std::memory_order_release);
  }

  // Frees the records. No other function may be called afterwards.
  void Free();

 private:
  LayerRecord(RecordFile* file, int kv_head_count) : file_(file), kv_head_count_(kv_head_count) {}

  std::atomic<uint64_t>& Length() const;
  std::atomic<uint32_t>& Entry(int kv_head, int64_t page) const;
  int64_t EntryCountMax() const;

  RecordFile* file_;
  int kv_head_count_;
  std::vector<RecordIndex> parts_;
};

}  // namespace spillway
