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

// What a job is to a device that serves a few at once.
enum class JobKind {
  kStep,  // of decoding: every item attends, with a few queries, and appends no more tokens
  kLong,  // all else: it may take a thousand times as long
};
inline constexpr std::array<JobKind, 2> kJobKinds = {JobKind::kStep, JobKind::kLong};
JobKind KindOf(const Job& job);

// A job that waits for its turn, and whom to tell when it was served.
struct QueuedJob {
  std::unique_ptr<Job> job;
  Device::Completion done;
  // Not to be joined with others.
  bool alone = false;
  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
};

// Jobs that are served as one: the items of all, in their order. Each part is as good
// as served by itself: its items have their own status, and it is cancelled only
// together with all others.
class JobBatch {
 public:
  // REQUIRES: one part at least; all of one model and layer.
  explicit JobBatch(std::vector<QueuedJob> parts);

  Job& job() { return joined_ != nullptr ? *joined_ : *parts_.front().job; }
  size_t part_count() const { return parts_.size(); }
  // The device begins it: of each part it is known how long it waited.
  void Begin();
  // The parts with their items again, and with what was filled in. Ends the batch.
  std::vector<QueuedJob> Split();

 private:
  std::vector<QueuedJob> parts_;
  std::unique_ptr<Job> joined_;  // null: there is one part
};

// Jobs that wait until a device has room for them. Of a kind owners take turns, and of an owner
// who comes first is served first. Decode steps of one layer of a model that wait at the same
// moment are joined: the first takes those behind it along, and waits for no other. Not
// thread-safe.
class JobQueue {
 public:
  // Items of a batch, unless one job alone has more.
  static constexpr size_t kBatchItemsMax = 64;

  void Push(QueuedJob job);
  // Back to where they came from, before all others, to be served one by one.
  void PutBack(std::vector<QueuedJob> jobs);
  // What is next of a kind. Nothing: none of that kind waits.
  std::optional<JobBatch> Take(JobKind kind);
  bool empty() const { return waiting_[0].empty() && waiting_[1].empty(); }

 private:
  std::list<QueuedJob>& Waiting(JobKind kind) { return waiting_[static_cast<int>(kind)]; }

  std::list<QueuedJob> waiting_[kJobKinds.size()];  // by kind, the first first
  FairOrder order_[kJobKinds.size()];
};

}  // namespace spillway
