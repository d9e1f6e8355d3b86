#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gpu/kernels/attend.h"
#include "host/device/device.h"
#include "host/device/job_stage.h"

// How long the stages of a job took on a GPU. A captured graph has no events between its kernels:
// the kernels note the moments themselves.
namespace spillway::cuda {

// Sums over a job's parts. Not thread-safe.
class StageTimes {
 public:
  void Add(JobStage stage, double us) { us_[static_cast<size_t>(stage)] += us; }

  // A sparse wave's stages, from its first kernel to its last unit's end. first: the result of its
  // first unit. ends: when its last unit ended, ns. append_begins: when an append did that is
  // a part of the wave, ns; 0: there is none. Nothing of a wave that did not run to its end.
  void AddWave(const UnitResult& first, uint64_t ends, uint64_t append_begins);

  // From the first wave's beginning to the last one's end: waves of a step may run beside each
  // other.
  double waves_us() const { return static_cast<double>(last_ - first_) / 1e3; }
  // Those that took time, in the order that they run in.
  std::vector<StageTime> Named() const;

 private:
  std::array<double, kJobStageNames.size()> us_{};
  uint64_t first_ = 0, last_ = 0;  // ns
};

}  // namespace spillway::cuda
