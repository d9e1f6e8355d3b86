#pragma once

#include <chrono>
#include <cstddef>
#include <list>

#include "absl/base/thread_annotations.h"
#include "grpc/grpc.h"
#include "host/base/mutex.h"

namespace spillway {

// Calls of which the request has not arrived yet. They end if they take too long, or if too many
// wait. Thread-safe.
class WaitingCalls {
 public:
  using Clock = std::chrono::steady_clock;

  // count_max: with one more, the call that has waited longest ends.
  explicit WaitingCalls(size_t count_max) : count_max_(count_max) {}

  struct Waiting {
    grpc_call* call;
    Clock::time_point begin;
    bool ended = false;
  };
  using Place = std::list<Waiting>::iterator;

  // The call must exist until Remove().
  Place Add(grpc_call* call) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(Place place) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends calls that have waited for longer than `max`; 0: none.
  void EndIdle(Clock::time_point now, std::chrono::duration<double> max)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The oldest call, which the caller must end.
  grpc_call* TakeOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t count_max_;
  Mutex mutex_;
  std::list<Waiting> calls_ ABSL_GUARDED_BY(mutex_);  // oldest first
  std::list<Waiting> ended_ ABSL_GUARDED_BY(mutex_);  // not removed yet
};

}  // namespace spillway
