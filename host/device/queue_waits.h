#pragma once

#include <array>
#include <cstddef>

#include "host/base/distribution.h"
#include "host/device/job_queue.h"

namespace spillway {

// How long jobs waited in a device's queue, by kind. Thread-safe.
class QueueWaits {
 public:
  // Called when a job begins; reads Job::queue_time_us.
  void Note(const Job& job) {
    seconds_[static_cast<size_t>(KindOf(job))].Note(job.queue_time_us / 1e6);
  }
  const SecondsDistribution& Of(JobKind kind) const { return seconds_[static_cast<size_t>(kind)]; }

 private:
  std::array<SecondsDistribution, kJobKinds.size()> seconds_;
};

}  // namespace spillway
