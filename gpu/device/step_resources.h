#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/job_context.h"
#include "host/base/mutex.h"
#include "host/device/step_memory.h"

namespace spillway::cuda {

// What a step on a stream takes from CUDA, apart from its graphs and from an event for each
// announcement.
struct StepResources {
  // Two announcements in flight and one that is planned, each with pinned memory of its own.
  static constexpr int kSlotCount = 3;

  // What a step may use of it.
  StepMemory memory() const;
  int64_t pinned_bytes() const;  // of all announcements

  DeviceBuffer device;
  std::array<PinnedBuffer, kSlotCount> pinned;
  Stream capture;
  StepLane side;  // for what runs beside all lanes
  std::array<StepLane, kStepLanesMax - 1> lanes;
};

// Keeps the resources of steps that have ended for the next ones: to allocate and free them takes
// several ms, in which the GPU idles, and in serving the sequences of a step change often. While
// prompts come, several steps of different sizes are open at a time. Kept resources stay charged to
// the budgets until another step or job needs the memory. Pages cannot take it: on the GPU they
// have a part of the memory of their own, and of host memory it is a small part. Thread-safe.
class StepResourcePool {
 public:
  // step_bytes: memory of up to this size may have room for a larger step. The budgets must outlive
  // this object.
  StepResourcePool(int ordinal, int64_t step_bytes, MemoryBudget* device_budget,
                   MemoryBudget* host_budget);
  ~StepResourcePool();
  StepResourcePool(const StepResourcePool&) = delete;
  StepResourcePool& operator=(const StepResourcePool&) = delete;

  // Resources with at least so many bytes of GPU memory and, for each announcement, of pinned
  // memory. Contents are undefined. RESOURCE_EXHAUSTED. REQUIRES: this GPU is the current device.
  absl::StatusOr<StepResources> Take(int64_t device_bytes, int64_t pinned_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees the smallest ones, if there are more than four or they take a large part of the host
  // memory's limit. REQUIRES: nothing on the GPU uses them.
  void Keep(StepResources resources) ABSL_LOCKS_EXCLUDED(mutex_);
  // A number that no step of this GPU had, from 1 on. Steps that use the same memory one after the
  // other have different versions, so launches of the first do nothing in the second.
  uint64_t NextVersion() { return ++last_version_; }

 private:
  void Drop() ABSL_LOCKS_EXCLUDED(mutex_);

  const int ordinal_;
  const int64_t step_bytes_;
  MemoryBudget* const device_budget_;
  MemoryBudget* const host_budget_;
  std::atomic<uint64_t> last_version_ = 0;
  std::list<MemoryBudget::Reclaim>::iterator device_reclaim_, host_reclaim_;
  Mutex mutex_;
  std::vector<StepResources> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway::cuda
