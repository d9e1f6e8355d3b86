#include "gpu/device/stream_slot.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace spillway::cuda {
namespace {

constexpr int64_t kStep = int64_t{1} << 20;
constexpr size_t kGraphsMax = 32;

}  // namespace

GraphCache::Entry* GraphCache::Find(const Wave& wave) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.wave == wave; });
  if (found != entries_.end()) {
    std::rotate(entries_.begin(), found, found + 1);
    return &entries_.front();
  }
  if (entries_.size() == kGraphsMax) entries_.pop_back();
  entries_.insert(entries_.begin(), Entry{wave, {}});
  return nullptr;
}

absl::StatusOr<std::unique_ptr<StreamSlot>> StreamSlot::Create(MemoryBudget* device_budget,
                                                               MemoryBudget* host_budget,
                                                               int64_t wave_bytes) {
  auto slot = std::make_unique<StreamSlot>();
  slot->device_budget_ = device_budget;
  slot->host_budget_ = host_budget;
  slot->wave_bytes_ = wave_bytes;
  absl::StatusOr<Stream> stream = Stream::Create();
  if (!stream.ok()) return stream.status();
  slot->stream_ = *std::move(stream);
  for (Event* event : {&slot->start_, &slot->done_}) {
    absl::StatusOr<Event> created = Event::Create(/*timing=*/true);
    if (!created.ok()) return created.status();
    *event = *std::move(created);
  }
  absl::StatusOr<PinnedBuffer> cancel =
      PinnedBuffer::Create(64, host_budget, "a stream slot of a GPU");
  if (!cancel.ok()) return cancel.status();
  slot->cancel_ = *std::move(cancel);
  *slot->cancel() = 0;
  absl::StatusOr<PinnedBuffer> lists =
      PinnedBuffer::Create(sizeof(AppendLists), host_budget, "a stream slot of a GPU");
  if (!lists.ok()) return lists.status();
  slot->lists_ = *std::move(lists);
  return slot;
}

absl::StatusOr<std::byte*> StreamSlot::Workspace(int64_t bytes) {
  if (bytes > workspace_.bytes()) {
    // The old one first: the two need not fit together.
    workspace_ = DeviceBuffer();
    const int64_t rounded = (std::max(bytes, 4 * kStep) + kStep - 1) / kStep * kStep;
    absl::StatusOr<DeviceBuffer> grown =
        DeviceBuffer::Create(rounded, device_budget_, "the workspace of an attend");
    if (!grown.ok()) return grown.status();
    workspace_ = *std::move(grown);
  }
  return workspace_.data();
}

absl::StatusOr<std::byte*> StreamSlot::Pinned(int64_t bytes) {
  if (bytes > pinned_.bytes()) {
    pinned_ = PinnedBuffer();
    const int64_t rounded = (bytes + kStep - 1) / kStep * kStep;
    absl::StatusOr<PinnedBuffer> grown =
        PinnedBuffer::Create(rounded, host_budget_, "the requests of an attend");
    if (!grown.ok()) return grown.status();
    pinned_ = *std::move(grown);
  }
  return pinned_.data();
}

}  // namespace spillway::cuda
