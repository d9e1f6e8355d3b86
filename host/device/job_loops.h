#pragma once

#include <cstdint>

#include "host/base/parallel.h"
#include "host/device/short_jobs.h"

namespace spillway {

// Runs the loops of one job. Without ShortJobs, only the workers of this arena run them. With
// ShortJobs, threads inside longer jobs help, and this job lets shorter ones go first. A view: copy
// it freely.
class JobLoops {
 public:
  JobLoops() = default;
  // short_jobs must outlive this. work: of the whole job (host/device/job_work.h).
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
