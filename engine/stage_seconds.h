#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "host/base/distribution.h"
#include "host/device/device.h"
#include "host/device/job_stage.h"

namespace spillway {

// How long the stages of jobs took. Thread-safe, each stage by itself.
class StageSeconds {
 public:
  // Adds the stages of one job (Job::stages). Stages that are no JobStage are left out.
  void Note(std::span<const StageTime> stages) {
    for (const StageTime& stage : stages) {
      for (size_t i = 0; i < kJobStageNames.size(); ++i) {
        if (stage.name == kJobStageNames[i]) seconds_[i].Note(stage.us / 1e6);
      }
    }
  }
  const SecondsDistribution& Of(JobStage stage) const {
    return seconds_[static_cast<size_t>(stage)];
  }

 private:
  std::array<SecondsDistribution, kJobStageNames.size()> seconds_;
};

}  // namespace spillway
