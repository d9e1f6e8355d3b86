#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "host/device/device.h"
#include "host/device/fair_order.h"

namespace spillway {

// The kinds of jobs that a device tells apart if it serves several at once.
enum class JobKind {
  // A decode step: every item attends, with few queries, and appends at most as many tokens as it
  // has queries.
  kStep,
  // Everything else. Such a job may take a thousand times as long.
  kLong,
};
inline constexpr std::array<JobKind, 2> kJobKinds = {JobKind::kStep, JobKind::kLong};
JobKind KindOf(const Job& job);

// A job that waits for its turn, and the callback for its completion.
struct QueuedJob {
  std::unique_ptr<Job> job;
  Device::Completion done;
  // Not to be joined with other jobs.
  bool alone = false;
  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
};

// Jobs that are served as one job, which has the items of all, in order. Each part behaves as if it
// were served alone: its items have their own status. But it is cancelled only together with all
// others.
class JobBatch {
 public:
  // REQUIRES: at least one part, and all parts of one model and layer.
  explicit JobBatch(std::vector<QueuedJob> parts);

  Job& job() { return joined_ != nullptr ? *joined_ : *parts_.front().job; }
  size_t part_count() const { return parts_.size(); }
  // Called when the device begins the batch: sets how long each part has waited.
  void Begin();
  // The parts, with their items and all that the device filled in. Ends the batch.
  std::vector<QueuedJob> Split();

 private:
  std::vector<QueuedJob> parts_;
  std::unique_ptr<Job> joined_;  // null: there is only one part
};

// Jobs that wait until a device has room for them. Within a kind, owners take turns, and the jobs
// of one owner are served in order of arrival. Decode steps of the same model and layer that wait
// at the same moment are joined: the first takes the others along, but does not wait for more. Not
// thread-safe.
class JobQueue {
 public:
  // Items of a batch, at most; a single job may have more.
  static constexpr size_t kBatchItemsMax = 64;

  void Push(QueuedJob job);
  // Puts jobs back to the front of the queue, to be served one by one.
  void PutBack(std::vector<QueuedJob> jobs);
  // The next batch of a kind; nullopt if no job of that kind waits.
  std::optional<JobBatch> Take(JobKind kind);
  bool empty() const { return waiting_[0].empty() && waiting_[1].empty(); }

 private:
  std::list<QueuedJob>& Waiting(JobKind kind) { return waiting_[static_cast<int>(kind)]; }

  std::list<QueuedJob> waiting_[kJobKinds.size()];  // by kind, in order of arrival
  FairOrder order_[kJobKinds.size()];
};

}  // namespace spillway
