#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/rows_fetch.h"
#include "host/base/mutex.h"
#include "host/device/device.h"

namespace spillway::cuda {

// Copies rows from their pages in pinned memory to tensors in GPU memory, one fetch after the
// other, on a stream and a thread of its own, so that attends do not wait. Of a range, the GPU's
// copy engine copies long contiguous runs and a kernel the rest. The 1 % of the rows that the GPU
// also holds are read over the link too, because the sequence may change them meanwhile.
// Thread-safe.
class RowFetcher {
 public:
  // Both budgets and gpu.name must outlive this object.
  RowFetcher(const Gpu& gpu, MemoryBudget* device_budget, MemoryBudget* host_budget);
  // Serves all waiting fetches first.
  ~RowFetcher();
  RowFetcher(const RowFetcher&) = delete;
  RowFetcher& operator=(const RowFetcher&) = delete;

  // As Device::Fetch(). REQUIRES: work.on_gpu. INVALID_ARGUMENT for memory that is not this GPU's;
  // RESOURCE_EXHAUSTED if the fetcher's own memory, which the first fetch allocates, does not fit.
  void Fetch(const FetchWork& work, Device::FetchDone done) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Most chosen rows of one launch and its lists.
  static constexpr int64_t kRowsMax = 65536;

  // What a launch reads, on host and GPU: filled while the launch before runs.
  struct Lists {
    std::array<const std::byte*, kRowsMax> pages;
    std::array<uint32_t, kRowsMax> slots;
  };
  struct Stage {
    PinnedBuffer pinned;
    DeviceBuffer device;
    Event done;

    Lists& host() const { return *reinterpret_cast<Lists*>(pinned.data()); }
    // Only to compute addresses.
    Lists& on_gpu() const { return *reinterpret_cast<Lists*>(device.data()); }
  };
  static constexpr size_t kStages = 2;
  // Launches of a range in flight: enough that none waits for the host.
  static constexpr size_t kLaunches = 4;
  struct Task {
    const FetchWork* work = nullptr;
    Device::FetchDone done;
  };

  void Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Run(const FetchWork& work);
  absl::Status Prepare();
  absl::Status PrepareLists();
  // INVALID_ARGUMENT unless k and v are in this GPU's memory and aligned.
  absl::Status CheckTargets(const FetchWork& work) const;
  absl::Status CopyRange(const FetchWork& work);
  absl::Status CopyChosen(const FetchWork& work);
  // The next stage, once no launch reads it. An error if the fetch was cancelled.
  absl::StatusOr<Stage*> NextStage(const FetchWork& work);
  // Launches the fetch of the listed rows: `pages` pages and fetch.row_count slots.
  absl::Status Launch(Stage& stage, int64_t pages, RowsFetch fetch);
  // Copies rows [token, token + count) of a KV head by the copy engine. They are in one extent.
  absl::Status CopyByEngine(const FetchWork& work, int kv_head, int64_t token, int64_t count);
  // The next event for a launch, once few enough are in flight. An error if the fetch was
  // cancelled.
  absl::StatusOr<cudaEvent_t> NextLaunch(const FetchWork& work);
  // Launches pieces of a range, and empties the list. Errors as in NextLaunch().
  absl::Status Launch(const FetchWork& work, PagesFetch& fetch);

  const Gpu gpu_;
  MemoryBudget* const device_budget_;
  MemoryBudget* const host_budget_;
  // Used only by the thread.
  Stream stream_;
  std::array<Stage, kStages> stages_;
  size_t turn_ = 0;
  std::array<Event, kLaunches> launched_;
  size_t launch_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Task> waiting_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace spillway::cuda
