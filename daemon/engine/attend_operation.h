#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "daemon/engine/engine.h"

namespace spillway {

// One layer of one or several sequences, with or without an append before: one
// device job.
class Engine::AttendOperation : public OrderedQueues::Operation {
 public:
  AttendOperation(Engine* engine, AttendRequest request, Done<AttendOutcome> done)
      : engine_(engine), request_(std::move(request)), done_(std::move(done)) {}

  void Start() override;

 private:
  absl::Status Check();
  // Validates one item and decides whether its chunk is appended.
  absl::Status CheckItem(AttendItem& item);
  absl::Status Prepare();
  void Submit();
  void OnJobDone(std::unique_ptr<Job> job);
  // Counts where the job's time went, and notes it down where that was long.
  void NoteTimes(const Job& job);
  // Undoes what a failed item has appended, counts, shares rows.
  void Settle(AttendItem& item, const Job& job, const JobItem& done, AttendOutcome& outcome);
  void End(absl::StatusOr<AttendOutcome> outcome);
  LayerRows& RowsOf(const AttendItem& item) { return item.sequence->rows[request_.layer]; }

  using Clock = std::chrono::steady_clock;

  Engine* const engine_;
  const Clock::time_point asked_ = Clock::now();
  Clock::time_point begun_;  // its sequences' turn has come
  AttendRequest request_;
  const Done<AttendOutcome> done_;
  // Of each item, where attends are audited: its policy as it came, and the
  // levels that its heads were served with.
  struct Audited {
    Policy policy;
    std::vector<int> levels;
  };
  std::vector<Audited> audited_;
};

}  // namespace spillway
