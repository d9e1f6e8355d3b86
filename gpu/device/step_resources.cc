#include "gpu/device/step_resources.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/cuda/current_device.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

constexpr std::string_view kWhat = "a step on a stream";
constexpr int64_t kGranuleMin = int64_t{1} << 20;
constexpr int64_t kPinnedRoomMax = int64_t{64} << 20;
// Kept memory is at most this part of the host memory's limit.
constexpr int64_t kHostShare = 40;
// Steps whose memory is kept.
constexpr size_t kKeptMax = 4;

// Up to a quarter more, so that the next step may be a little larger.
int64_t WithRoom(int64_t bytes) {
  const auto quarter = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)) / 4);
  const int64_t granule = std::max(quarter, kGranuleMin);
  return (bytes + granule - 1) / granule * granule;
}

// Makes a buffer of at least `bytes` bytes, with room if there is memory for it, and if it then has
// at most room_max.
template <typename Buffer>
absl::Status Grow(Buffer& buffer, int64_t bytes, int64_t room_max, MemoryBudget* budget) {
  if (buffer.bytes() >= bytes) return absl::OkStatus();
  // Free the old one first: the two need not fit together.
  buffer = Buffer();
  const int64_t more = WithRoom(bytes);
  absl::StatusOr<Buffer> made = Buffer::Create(more <= room_max ? more : bytes, budget, kWhat);
  if (absl::IsResourceExhausted(made.status())) made = Buffer::Create(bytes, budget, kWhat);
  if (!made.ok()) return made.status();
  buffer = *std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<StepLane> CreateLane() {
  StepLane lane;
  ASSIGN_OR_RETURN(lane.stream, Stream::Create());
  ASSIGN_OR_RETURN(lane.begins, Event::Create(/*timing=*/false));
  ASSIGN_OR_RETURN(lane.ends, Event::Create(/*timing=*/false));
  return lane;
}

}  // namespace

StepMemory StepResources::memory() const {
  int64_t least = pinned.front().bytes();
  for (const PinnedBuffer& buffer : pinned) least = std::min(least, buffer.bytes());
  return {device.bytes(), least};
}

int64_t StepResources::pinned_bytes() const {
  int64_t bytes = 0;
  for (const PinnedBuffer& buffer : pinned) bytes += buffer.bytes();
  return bytes;
}

StepResourcePool::StepResourcePool(int ordinal, int64_t step_bytes, MemoryBudget* device_budget,
                                   MemoryBudget* host_budget)
    : ordinal_(ordinal),
      step_bytes_(step_bytes),
      device_budget_(device_budget),
      host_budget_(host_budget),
      device_reclaim_(device_budget->AddReclaim([this](int64_t) { Drop(); })),
      host_reclaim_(host_budget->AddReclaim([this](int64_t) { Drop(); })) {}

StepResourcePool::~StepResourcePool() {
  device_budget_->RemoveReclaim(device_reclaim_);
  host_budget_->RemoveReclaim(host_reclaim_);
  Drop();
}

absl::StatusOr<StepResources> StepResourcePool::Take(int64_t device_bytes, int64_t pinned_bytes) {
  StepResources made;
  {
    const MutexLock lock(mutex_);
    std::vector<StepMemory> sizes;
    for (const StepResources& kept : kept_) sizes.push_back(kept.memory());
    const std::optional<size_t> found = FindStepMemory(sizes, {device_bytes, pinned_bytes});
    if (found.has_value()) {
      std::swap(made, kept_[*found]);
      kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(*found));
    }
  }
  if (made.capture.get() == nullptr) {
    ASSIGN_OR_RETURN(made.capture, Stream::Create());
    ASSIGN_OR_RETURN(made.side, CreateLane());
    for (StepLane& lane : made.lanes) {
      ASSIGN_OR_RETURN(lane, CreateLane());
    }
  }
  for (PinnedBuffer& pinned : made.pinned) {
    RETURN_IF_ERROR(Grow(pinned, pinned_bytes, kPinnedRoomMax, host_budget_));
  }
  RETURN_IF_ERROR(Grow(made.device, device_bytes, step_bytes_, device_budget_));
  return made;
}

void StepResourcePool::Keep(StepResources resources) {
  const int64_t pinned_max = host_budget_->limit_bytes() / kHostShare;
  int64_t pinned = resources.pinned_bytes();
  if (pinned > pinned_max) return;
  std::vector<StepResources> dropped;  // freed after the lock
  const MutexLock lock(mutex_);
  for (const StepResources& kept : kept_) pinned += kept.pinned_bytes();
  kept_.push_back(std::move(resources));
  while (kept_.size() > kKeptMax || pinned > pinned_max) {
    const auto smallest = std::ranges::min_element(
        kept_, {}, [](const StepResources& kept) { return kept.memory().total(); });
    pinned -= smallest->pinned_bytes();
    dropped.push_back(std::move(*smallest));
    kept_.erase(smallest);
  }
}

void StepResourcePool::Drop() {
  const CurrentDevice current(ordinal_);
  std::vector<StepResources> dropped;
  const MutexLock lock(mutex_);
  std::swap(kept_, dropped);
}

}  // namespace spillway::cuda
