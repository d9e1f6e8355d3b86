#include "host/memory/layer_record.h"

#include <cassert>
#include <cstddef>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "host/base/limits.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Layout of the payloads in the file. Entry page * kv_head_count + kv_head is for one page of one
// KV head.
struct FirstPart {
  std::atomic<uint64_t> token_count;
  std::atomic<uint32_t> next_layer;
  uint32_t unused;
  std::atomic<uint32_t> entries[(sizeof(Record::payload) - 16) / (sizeof(uint32_t))];
};
struct Part {
  std::atomic<uint32_t> entries[sizeof(Record::payload) / (sizeof(uint32_t))];
};
constexpr int64_t kFirstEntries = std::extent_v<decltype(FirstPart::entries)>;
constexpr int64_t kPartEntries = std::extent_v<decltype(Part::entries)>;
static_assert(offsetof(Record, payload) % alignof(FirstPart) == 0);

}  // namespace

absl::StatusOr<LayerRecord> LayerRecord::Create(RecordFile* file, int kv_head_count) {
  LayerRecord record(file, kv_head_count);
  ASSIGN_OR_RETURN(const RecordIndex first, file->Allocate());
  record.parts_.push_back(first);
  record.SetNextLayer(0);
  record.SetTokenCount(0);
  return record;
}

absl::StatusOr<LayerRecord> LayerRecord::Open(RecordFile* file, RecordIndex first,
                                              int kv_head_count, int64_t page_token_count) {
  LayerRecord record(file, kv_head_count);
  RETURN_IF_ERROR(file->Claim(first));
  record.parts_.push_back(first);
  const int64_t count = record.token_count();
  if (count < 0 || count > kTokenCountMax) {
    return absl::DataLossError(
        absl::StrCat("a layer of ", count, " tokens is not in [0, ", kTokenCountMax, "]"));
  }
  const int64_t pages = (count + page_token_count - 1) / page_token_count;
  for (RecordIndex next = 0; record.EntryCountMax() < pages * kv_head_count;) {
    next = file->At(record.parts_.back()).next.load(std::memory_order_relaxed);
    RETURN_IF_ERROR(file->Claim(next));
    record.parts_.push_back(next);
  }
  // Any parts that follow were reserved for tokens that were never committed.
  file->At(record.parts_.back()).next.store(0, std::memory_order_relaxed);
  return record;
}

RecordIndex LayerRecord::next_layer() const {
  return file_->Payload<FirstPart>(first()).next_layer.load(std::memory_order_relaxed);
}

void LayerRecord::SetNextLayer(RecordIndex next) {
  file_->Payload<FirstPart>(first()).next_layer.store(next, std::memory_order_release);
}

std::atomic<uint64_t>& LayerRecord::Length() const {
  return file_->Payload<FirstPart>(first()).token_count;
}

uint64_t* LayerRecord::length_word() const {
  static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  return reinterpret_cast<uint64_t*>(&Length());
}

int64_t LayerRecord::EntryCountMax() const {
  return kFirstEntries + (static_cast<int64_t>(parts_.size()) - 1) * kPartEntries;
}

std::atomic<uint32_t>& LayerRecord::Entry(int kv_head, int64_t page) const {
  const int64_t entry = page * kv_head_count_ + kv_head;
  assert(entry < EntryCountMax());
  if (entry < kFirstEntries) return file_->Payload<FirstPart>(first()).entries[entry];
  const int64_t beyond = entry - kFirstEntries;
  const RecordIndex part = parts_[1 + beyond / kPartEntries];
  return file_->Payload<Part>(part).entries[beyond % kPartEntries];
}

absl::Status LayerRecord::Reserve(int64_t page_count) {
  while (EntryCountMax() < page_count * kv_head_count_) {
    ASSIGN_OR_RETURN(const RecordIndex part, file_->Allocate());
    file_->At(parts_.back()).next.store(part, std::memory_order_release);
    parts_.push_back(part);
  }
  return absl::OkStatus();
}

void LayerRecord::Free() {
  file_->FreeChain(first());
  parts_.clear();
}

}  // namespace spillway
