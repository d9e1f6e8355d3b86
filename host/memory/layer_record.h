#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/record_file.h"

namespace spillway {

// What outlives the process of one (sequence, layer): which pages its rows lie in, and how many
// rows are committed. That is one 64-bit word, written after the rows and before anybody is told
// of them: a page's place beyond it means nothing. Not thread-safe; the word may be read by others.
class LayerRecord {
 public:
  // Of no tokens. RESOURCE_EXHAUSTED.
  static absl::StatusOr<LayerRecord> Create(RecordFile* file, int kv_head_count);
  // As a process before this one left it. DATA_LOSS for what cannot be.
  static absl::StatusOr<LayerRecord> Open(RecordFile* file, RecordIndex first, int kv_head_count,
                                          int64_t page_token_count);
  LayerRecord(LayerRecord&&) = default;
  LayerRecord& operator=(LayerRecord&&) = delete;

  RecordIndex first() const { return parts_.front(); }
  // The record of the next layer; 0: the last.
  RecordIndex next_layer() const;
  void SetNextLayer(RecordIndex next);

  int64_t token_count() const {
    return static_cast<int64_t>(Length().load(std::memory_order_acquire));
  }
  // Everything that was written before is there for who sees it.
  void SetTokenCount(int64_t count) {
    Length().store(static_cast<uint64_t>(count), std::memory_order_release);
  }

  // The word itself, for a device that writes it. It stays where it is.
  uint64_t* length_word() const;

  // Makes room for so many pages of each KV head. RESOURCE_EXHAUSTED changes nothing that can be
  // seen.
  absl::Status Reserve(int64_t page_count);
  // PageRef::index of page `page` of a KV head. REQUIRES: reserved.
  uint32_t PageIndex(int kv_head, int64_t page) const {
    return Entry(kv_head, page).load(std::memory_order_relaxed);
  }
  void SetPageIndex(int kv_head, int64_t page, uint32_t index) {
    Entry(kv_head, page).store(index, std::memory_order_release);
  }

  // Gives its memory back. Nothing else is called after.
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
