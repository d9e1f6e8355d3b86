#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gpu/kernels/attend.h"
#include "host/device/device.h"
#include "host/device/job_stage.h"

// How long the stages of a job took on a GPU. A captured graph has no events between its kernels,
// so the kernels record the times.
namespace spillway::cuda {

// Sums over a job's parts. Not thread-safe.
class StageTimes {
 public:
  void Add(JobStage stage, double us) { us_[static_cast<size_t>(stage)] += us; }

  // Adds the stages of a sparse wave, from the start of its first kernel to the end of its last
  // unit. first: the result of the first unit. ends: when the last unit ended, ns. append_begins:
  // when the wave's append began, ns; 0: no append. Adds nothing if the wave did not run to its
  // end.
  void AddWave(const UnitResult& first, uint64_t ends, uint64_t append_begins);

  // From the start of the first wave to the end of the last one: waves of a step may run
  // concurrently.
  double waves_us() const { return static_cast<double>(last_ - first_) / 1e3; }
  // The stages that took time, in the order in which they run.
  std::vector<StageTime> Named() const;

 private:
  std::array<double, kJobStageNames.size()> us_{};
  uint64_t first_ = 0, last_ = 0;  // ns
};

}  // namespace spillway::cuda
