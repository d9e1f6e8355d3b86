#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace spillway {

// Attends at one layer of one or several sequences, with or without an append before, in one device
// job.
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
  // Counts where the job's time went, and records the attend if it was slow.
  void NoteTimes(const Job& job);
  // Undoes the append of a failed item, and counts what was done.
  void Settle(AttendItem& item, const Job& job, const JobItem& done);
  void End(absl::StatusOr<AttendOutcome> outcome);
  LayerRows& RowsOf(const AttendItem& item) { return item.sequence->rows[request_.layer]; }

  using Clock = std::chrono::steady_clock;

  Engine* const engine_;
  const Clock::time_point asked_ = Clock::now();
  Clock::time_point begun_;  // when the turn of its sequences came
  AttendRequest request_;
  const Done<AttendOutcome> done_;
  // For each item, if attends are audited: its original policy, and the escalation levels of its
  // heads.
  struct Audited {
    Policy policy;
    std::vector<int> levels;
  };
  std::vector<Audited> audited_;
};

}  // namespace spillway
