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

// Copies rows from their pages in pinned memory to tensors in GPU memory, one fetch
// after the other, on a stream and in a thread of its own: attends wait for neither. Of a
// range, the GPU's copy engine takes what lies together in large pieces, a kernel the rest.
// Rows that the GPU holds too, a hundredth of all, cross the link as well: they are
// the sequence's, which may go on meanwhile. Thread-safe.
class RowFetcher {
 public:
  // Both budgets outlive it. gpu.name too.
  RowFetcher(const Gpu& gpu, MemoryBudget* device_budget, MemoryBudget* host_budget);
  // What waits is served before.
  ~RowFetcher();
  RowFetcher(const RowFetcher&) = delete;
  RowFetcher& operator=(const RowFetcher&) = delete;

  // As Device::Fetch. REQUIRES: work.on_gpu. INVALID_ARGUMENT for what is not this GPU's
  // memory; RESOURCE_EXHAUSTED for the fetcher's own, which the first fetch takes.
  void Fetch(const FetchWork& work, Device::FetchDone done) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Chosen rows of one launch, and of its list.
  static constexpr int64_t kRowsMax = 65536;

  // What a launch reads, in both memories: filled anew while the one before runs.
  struct Lists {
    std::array<const std::byte*, kRowsMax> pages;
    std::array<uint32_t, kRowsMax> slots;
  };
  struct Stage {
    PinnedBuffer pinned;
    DeviceBuffer device;
    Event done;

    Lists& host() const { return *reinterpret_cast<Lists*>(pinned.data()); }
    // For addresses alone.
    Lists& on_gpu() const { return *reinterpret_cast<Lists*>(device.data()); }
  };
  static constexpr size_t kStages = 2;
  // Launches of a range that are on their way: enough that none waits for the host.
  static constexpr size_t kLaunches = 4;
  struct Task {
    const FetchWork* work = nullptr;
    Device::FetchDone done;
  };

  void Serve() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Run(const FetchWork& work);
  absl::Status Prepare();
  absl::Status PrepareLists();
  // OK, or INVALID_ARGUMENT: whether k and v are this GPU's, and aligned.
  absl::Status CheckTargets(const FetchWork& work) const;
  absl::Status CopyRange(const FetchWork& work);
  absl::Status CopyChosen(const FetchWork& work);
  // The next stage, once nothing reads it any more; an error of the call's if nobody
  // waits for the rows.
  absl::StatusOr<Stage*> NextStage(const FetchWork& work);
  // Launches what the stage lists: `pages` pages, and slots.
  absl::Status Launch(Stage& stage, int64_t pages, RowsFetch fetch);
  // Copies rows [token, token + count) of a KV head that lie in one extent by the copy engine.
  absl::Status CopyByEngine(const FetchWork& work, int kv_head, int64_t token, int64_t count);
  // The next event of a launch's, once few launches are on their way; an error of the
  // call's if nobody waits for the rows.
  absl::StatusOr<cudaEvent_t> NextLaunch(const FetchWork& work);
  // Launches pieces of a range, and empties the list. Errors as of NextLaunch().
  absl::Status Launch(const FetchWork& work, PagesFetch& fetch);

  const Gpu gpu_;
  MemoryBudget* const device_budget_;
  MemoryBudget* const host_budget_;
  // The thread's.
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
