#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/device/device.h"

namespace spillway {

// An attend of one layer that took long, and where its time went.
struct SlowAttend {
  std::string sequence;  // the longest one, if there are several
  int sequence_count = 0;
  std::string model;
  int layer = 0;
  int64_t token_count = 0;        // of that sequence, visible to its last query
  int64_t query_count = 0;        // of that sequence
  double seconds = 0;             // from the request to its answer; the next three are parts of it
  double wait_seconds = 0;        // until the turn of its sequences
  double queue_seconds = 0;       // then in the device's queue
  double device_seconds = 0;      // then on the device
  std::vector<StageTime> stages;  // parts of device_seconds, if the device reports them
  std::string trace;              // trace id of the call (Caller::trace()); empty: none
};

// The slow attends since the last Take(), up to a few. Thread-safe. An attend that is not slow
// costs one read of the limit.
class SlowAttends {
 public:
  // seconds: an attend that takes at least this long is slow; 0: none is.
  explicit SlowAttends(double seconds) : seconds_(seconds) {}
  void SetSeconds(double seconds) { seconds_.store(seconds, std::memory_order_relaxed); }
  bool IsSlow(double seconds) const {
    const double limit = seconds_.load(std::memory_order_relaxed);
    return limit > 0 && seconds >= limit;
  }

  // The first ones, and how many more there were.
  struct Some {
    static constexpr size_t kCountMax = 5;
    std::vector<SlowAttend> attends;
    int64_t more_count = 0;
  };
  struct Taken {
    Some steps;   // decode steps (JobKind::kStep)
    Some others;  // prompts, and requests that only select rows
  };
  void Add(SlowAttend attend, bool is_step) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    Some& some = is_step ? taken_.steps : taken_.others;
    if (some.attends.size() < Some::kCountMax) {
      some.attends.push_back(std::move(attend));
    } else {
      ++some.more_count;
    }
  }
  // All slow attends since the last call.
  Taken Take() ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    return std::exchange(taken_, {});
  }

 private:
  std::atomic<double> seconds_;
  Mutex mutex_;
  Taken taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
