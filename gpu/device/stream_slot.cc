#include "gpu/device/stream_slot.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "host/base/status_macros.h"

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
                                                               int64_t wave_bytes, bool urgent) {
  auto slot = std::make_unique<StreamSlot>();
  slot->device_budget_ = device_budget;
  slot->host_budget_ = host_budget;
  slot->wave_bytes_ = wave_bytes;
  ASSIGN_OR_RETURN(slot->stream_, urgent ? Stream::CreateUrgent() : Stream::Create());
  ASSIGN_OR_RETURN(slot->side_stream_, Stream::Create());
  for (Stage& stage : slot->stages_) {
    ASSIGN_OR_RETURN(stage.filled, Event::Create(/*timing=*/false));
    ASSIGN_OR_RETURN(stage.coded, Event::Create(/*timing=*/false));
  }
  for (Event* event : {&slot->start_, &slot->done_, &slot->appended_, &slot->dense_}) {
    ASSIGN_OR_RETURN(*event, Event::Create(/*timing=*/true));
  }
  ASSIGN_OR_RETURN(slot->cancel_, PinnedBuffer::Create(64, host_budget, "a stream slot of a GPU"));
  *slot->cancel() = 0;
  ASSIGN_OR_RETURN(slot->lists_, PinnedBuffer::Create(sizeof(AppendLists), host_budget,
                                                      "a stream slot of a GPU"));
  ASSIGN_OR_RETURN(slot->append_scratch_,
                   DeviceBuffer::Create(kAppendScratchBytes + 64, device_budget, "a stream slot"));
  return slot;
}

absl::StatusOr<std::byte*> StreamSlot::Workspace(int64_t bytes) {
  if (bytes > workspace_.bytes()) {
    // Free the old one first: the two need not fit together.
    workspace_ = DeviceBuffer();
    const int64_t rounded = (std::max(bytes, 4 * kStep) + kStep - 1) / kStep * kStep;
    ASSIGN_OR_RETURN(workspace_,
                     DeviceBuffer::Create(rounded, device_budget_, "the workspace of an attend"));
  }
  return workspace_.data();
}

absl::StatusOr<std::byte*> StreamSlot::Pinned(int64_t bytes) {
  if (bytes > pinned_.bytes()) {
    pinned_ = PinnedBuffer();
    const int64_t rounded = (bytes + kStep - 1) / kStep * kStep;
    ASSIGN_OR_RETURN(pinned_,
                     PinnedBuffer::Create(rounded, host_budget_, "the requests of an attend"));
  }
  return pinned_.data();
}

}  // namespace spillway::cuda
