#pragma once

#include <cstdint>

#include "host/base/parallel.h"
#include "host/device/short_jobs.h"

namespace spillway {

// How the loops of one job run: by the workers of this arena alone, or with the help of threads
// inside longer jobs, as this one lets shorter ones go first. A view, to be copied.
class JobLoops {
 public:
  JobLoops() = default;
  // short_jobs outlives it. work: of the whole job (host/device/job_work.h).
  JobLoops(ShortJobs* short_jobs, int64_t work) : short_jobs_(short_jobs), work_(work) {}

  // f(i) for every i of [0, count): ShortJobs::Loop().
  template <typename F>
  void Run(int64_t count, const F& f) const {
    if (short_jobs_ != nullptr) {
      short_jobs_->Loop(work_, count, f);
    } else {
      ParallelFor(int64_t{0}, count, f);
    }
  }
  // ShortJobs::Pause().
  void Pause() const {
    if (short_jobs_ != nullptr) short_jobs_->Pause(work_);
  }

 private:
  ShortJobs* short_jobs_ = nullptr;
  int64_t work_ = 0;
};

}  // namespace spillway
