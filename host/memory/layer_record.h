#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/checksum.h"
#include "host/memory/record_file.h"

namespace spillway {

// The data of one (sequence, layer) that outlive the process: which pages hold its rows, the number
// of committed rows, and checksums of them. The number is one word, written after the rows and
// before any caller learns of them; entries of pages beyond it mean nothing. Not thread-safe, but
// other threads may read the word.
class LayerRecord {
 public:
  // A new record with no tokens. RESOURCE_EXHAUSTED.
  static absl::StatusOr<LayerRecord> Create(RecordFile* file, int kv_head_count);
  // As an earlier process left it. DATA_LOSS if it is damaged, except for the entries of pages.
  static absl::StatusOr<LayerRecord> Open(RecordFile* file, RecordIndex first, int kv_head_count,
                                          int64_t page_token_count);
  LayerRecord(LayerRecord&&) = default;
  LayerRecord& operator=(LayerRecord&&) = delete;

  RecordIndex first() const { return parts_.front(); }
  // The first record of the next layer; 0: this is the last layer.
  RecordIndex next_layer() const;
  void SetNextLayer(RecordIndex next);

  int64_t token_count() const { return static_cast<int64_t>(Length().value()); }
  // open_sum: of the rows in the pages that these tokens do not fill; the caller defines it. A
  // thread or process that sees the new count also sees all earlier writes and the sum.
  void SetTokenCount(int64_t count, uint64_t open_sum);
  // The same where a device writes the count (length_word()): rows up to `count` are summed.
  void SetSummed(int64_t count, uint64_t open_sum);
  // What the last of the two calls said, if the process was killed between: of the call before. A
  // device may have written a larger token_count() since. Nothing if it is damaged.
  struct Summed {
    int64_t token_count = 0;
    uint64_t open_sum = 0;
  };
  std::optional<Summed> summed() const;

  // Address of the word with the count, for a device that writes it, and what to write for a count.
  // The address never changes.
  uint64_t* length_word() const;
  static uint64_t LengthWord(int64_t token_count);

  // Makes room for page_count pages of each KV head. RESOURCE_EXHAUSTED changes nothing visible.
  absl::Status Reserve(int64_t page_count);
  // PageRef::index of page `page` of a KV head. REQUIRES: Reserve() made room for it.
  uint32_t PageIndex(int kv_head, int64_t page) const {
    return static_cast<uint32_t>(At(kv_head, page).index.value());
  }
  void SetPageIndex(int kv_head, int64_t page, uint32_t index) {
    At(kv_head, page).index.Store(index, PageSalt(kv_head, page));
  }
  // Checksum of a page; the caller defines it.
  uint64_t PageSum(int kv_head, int64_t page) const {
    return At(kv_head, page).sum.load(std::memory_order_relaxed);
  }
  void SetPageSum(int kv_head, int64_t page, uint64_t sum) {
    At(kv_head, page).sum.store(sum, std::memory_order_release);
  }
  // Tokens before the first page whose index is damaged: token_count() if there is none.
  int64_t ReadableTokenCount(int64_t page_token_count) const;

  // Frees the records. No other function may be called afterwards.
  void Free();

 private:
  struct Entry {
    CheckedWord index;
    std::atomic<uint64_t> sum;
  };
  struct Slot;
  struct FirstPart;
  struct Part;

  LayerRecord(RecordFile* file, int kv_head_count) : file_(file), kv_head_count_(kv_head_count) {}

  static uint64_t PageSalt(int kv_head, int64_t page) {
    return static_cast<uint64_t>(page) << 32 | static_cast<uint32_t>(kv_head);
  }
  FirstPart& first_part() const;
  CheckedWord& Length() const;
  Entry& At(int kv_head, int64_t page) const;
  int64_t EntryCountMax() const;
  int NewestSlot() const;
  // Writes the slot that is not the newest, and returns the other one.
  Slot& WriteSlot(int64_t count, uint64_t open_sum);

  RecordFile* file_;
  int kv_head_count_;
  std::vector<RecordIndex> parts_;
};

}  // namespace spillway
