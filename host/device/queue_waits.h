#pragma once

#include <array>
#include <cstddef>

#include "host/base/distribution.h"
#include "host/device/job_queue.h"

namespace spillway {

// How long jobs waited in a device's queue, by what they are to it. Thread-safe.
class QueueWaits {
 public:
  // A job begins (Job::queue_time_us).
  void Note(const Job& job) {
    seconds_[static_cast<size_t>(KindOf(job))].Note(job.queue_time_us / 1e6);
  }
  const SecondsDistribution& Of(JobKind kind) const { return seconds_[static_cast<size_t>(kind)]; }

 private:
  std::array<SecondsDistribution, kJobKinds.size()> seconds_;
};

}  // namespace spillway
