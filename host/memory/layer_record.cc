#include "host/memory/layer_record.h"

#include <cassert>
#include <cstddef>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "host/base/limits.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Of the words of a layer.
constexpr uint64_t kLengthSalt = 7;
constexpr uint64_t kNextLayerSalt = 8;
constexpr uint64_t kSlotSalt = 9;

}  // namespace

// Two of them, of which one is damaged or out of date while the other one is written.
struct LayerRecord::Slot {
  CheckedWord token_count;
  std::atomic<uint64_t> open_sum;
};

// Layout of the payloads in the file. Entry page * kv_head_count + kv_head is for one page of one
// KV head.
struct LayerRecord::FirstPart {
  CheckedWord token_count;
  CheckedWord next_layer;
  Slot slots[2];
  Entry entries[(sizeof(Record::payload) - 2 * sizeof(CheckedWord) - 2 * sizeof(Slot)) /
                sizeof(Entry)];
};
struct LayerRecord::Part {
  Entry entries[sizeof(Record::payload) / (sizeof(Entry))];
};

LayerRecord::FirstPart& LayerRecord::first_part() const {
  static_assert(sizeof(Entry) == 16 && sizeof(FirstPart) <= sizeof(Record::payload));
  static_assert(offsetof(Record, payload) % alignof(FirstPart) == 0);
  return file_->Payload<FirstPart>(first());
}

absl::StatusOr<LayerRecord> LayerRecord::Create(RecordFile* file, int kv_head_count) {
  LayerRecord record(file, kv_head_count);
  ASSIGN_OR_RETURN(const RecordIndex first, file->Allocate());
  record.parts_.push_back(first);
  record.SetNextLayer(0);
  for (Slot& slot : record.first_part().slots) slot.token_count.Clear();
  record.Length().Store(0, kLengthSalt);
  record.SetTokenCount(0, 0);
  return record;
}

absl::StatusOr<LayerRecord> LayerRecord::Open(RecordFile* file, RecordIndex first,
                                              int kv_head_count, int64_t page_token_count) {
  LayerRecord record(file, kv_head_count);
  RETURN_IF_ERROR(file->Claim(first));
  record.parts_.push_back(first);
  const FirstPart& part = record.first_part();
  const std::optional<uint64_t> count = part.token_count.Load(kLengthSalt);
  if (!count || !part.next_layer.Load(kNextLayerSalt)) {
    return file->Damaged(first, "a layer's length or the number of the next layer is damaged");
  }
  if (*count > static_cast<uint64_t>(kTokenCountMax)) {
    return file->Damaged(
        first, absl::StrCat("a layer of ", *count, " tokens is not in [0, ", kTokenCountMax, "]"));
  }
  const int64_t pages = (record.token_count() + page_token_count - 1) / page_token_count;
  while (record.EntryCountMax() < pages * kv_head_count) {
    ASSIGN_OR_RETURN(const RecordIndex next, file->ClaimNext(record.parts_.back()));
    record.parts_.push_back(next);
  }
  // Any parts that follow were reserved for tokens that were never committed.
  file->At(record.parts_.back()).next.Store(0, Record::kNextSalt);
  return record;
}

RecordIndex LayerRecord::next_layer() const {
  return static_cast<RecordIndex>(first_part().next_layer.value());
}

void LayerRecord::SetNextLayer(RecordIndex next) {
  first_part().next_layer.Store(next, kNextLayerSalt);
}

CheckedWord& LayerRecord::Length() const { return first_part().token_count; }

uint64_t* LayerRecord::length_word() const {
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  return reinterpret_cast<uint64_t*>(&Length().word());
}

uint64_t LayerRecord::LengthWord(int64_t token_count) {
  return CheckedWord::Encode(static_cast<uint64_t>(token_count), kLengthSalt);
}

int LayerRecord::NewestSlot() const {
  const FirstPart& part = first_part();
  int newest = -1;
  uint64_t most = 0;
  for (int i = 0; i < 2; ++i) {
    const std::optional<uint64_t> count = part.slots[i].token_count.Load(kSlotSalt);
    if (!count || *count > part.token_count.value() || (newest >= 0 && *count < most)) continue;
    newest = i;
    most = *count;
  }
  return newest;
}

std::optional<LayerRecord::Summed> LayerRecord::summed() const {
  const int newest = NewestSlot();
  if (newest < 0) return std::nullopt;
  const Slot& slot = first_part().slots[newest];
  return Summed{static_cast<int64_t>(slot.token_count.value()),
                slot.open_sum.load(std::memory_order_relaxed)};
}

LayerRecord::Slot& LayerRecord::WriteSlot(int64_t count, uint64_t open_sum) {
  FirstPart& part = first_part();
  const int old = NewestSlot() == 0 ? 0 : 1;
  Slot& slot = part.slots[1 - old];
  slot.token_count.Clear();
  slot.open_sum.store(open_sum, std::memory_order_release);
  slot.token_count.Store(static_cast<uint64_t>(count), kSlotSalt);
  return part.slots[old];
}

void LayerRecord::SetTokenCount(int64_t count, uint64_t open_sum) {
  Slot& old = WriteSlot(count, open_sum);
  Length().Store(static_cast<uint64_t>(count), kLengthSalt);
  // Otherwise it could seem to be the newest, after the layer was cut.
  old.token_count.Clear();
}

void LayerRecord::SetSummed(int64_t count, uint64_t open_sum) {
  WriteSlot(count, open_sum).token_count.Clear();
}

int64_t LayerRecord::EntryCountMax() const {
  constexpr auto kFirstEntries = static_cast<int64_t>(std::extent_v<decltype(FirstPart::entries)>);
  constexpr auto kPartEntries = static_cast<int64_t>(std::extent_v<decltype(Part::entries)>);
  return kFirstEntries + (static_cast<int64_t>(parts_.size()) - 1) * kPartEntries;
}

LayerRecord::Entry& LayerRecord::At(int kv_head, int64_t page) const {
  constexpr auto kFirstEntries = static_cast<int64_t>(std::extent_v<decltype(FirstPart::entries)>);
  constexpr auto kPartEntries = static_cast<int64_t>(std::extent_v<decltype(Part::entries)>);
  const int64_t entry = page * kv_head_count_ + kv_head;
  assert(entry < EntryCountMax());
  if (entry < kFirstEntries) return first_part().entries[entry];
  const int64_t beyond = entry - kFirstEntries;
  const RecordIndex part = parts_[1 + beyond / kPartEntries];
  return file_->Payload<Part>(part).entries[beyond % kPartEntries];
}

int64_t LayerRecord::ReadableTokenCount(int64_t page_token_count) const {
  for (int64_t token = 0; token < token_count(); token += page_token_count) {
    const int64_t page = token / page_token_count;
    for (int head = 0; head < kv_head_count_; ++head) {
      const std::optional<uint64_t> index = At(head, page).index.Load(PageSalt(head, page));
      if (!index || *index > UINT32_MAX) return token;
    }
  }
  return token_count();
}

absl::Status LayerRecord::Reserve(int64_t page_count) {
  while (EntryCountMax() < page_count * kv_head_count_) {
    ASSIGN_OR_RETURN(const RecordIndex part, file_->Allocate());
    file_->At(parts_.back()).next.Store(part, Record::kNextSalt);
    parts_.push_back(part);
  }
  return absl::OkStatus();
}

void LayerRecord::Free() {
  file_->FreeChain(first());
  parts_.clear();
}

}  // namespace spillway
