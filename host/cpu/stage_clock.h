#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <vector>

#include "host/device/device.h"
#include "host/device/job_stage.h"

namespace spillway {

// Measures the stages of a job that run one after the other. One thread at a time.
class StageClock {
 public:
  using Clock = std::chrono::steady_clock;

  // Called when a stage begins.
  void Begin(Clock::time_point now = Clock::now()) { begin_ = now; }
  // Called when the stage has ended and the next begins. The times of a stage that runs several
  // times add up.
  void End(JobStage stage) {
    const Clock::time_point now = Clock::now();
    spent_[static_cast<size_t>(stage)] += now - begin_;
    begin_ = now;
  }
  // Times of the stages that ran, in the order of JobStage.
  std::vector<StageTime> times() const {
    std::vector<StageTime> times;
    times.reserve(spent_.size());
    for (size_t i = 0; i < spent_.size(); ++i) {
      if (spent_[i].count() > 0) times.push_back({kJobStageNames[i], spent_[i].count()});
    }
    return times;
  }

 private:
  Clock::time_point begin_;
  std::array<std::chrono::duration<double, std::micro>, kJobStageNames.size()> spent_{};
};

}  // namespace spillway
