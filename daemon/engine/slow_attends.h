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

// A request to attend at a layer that took long, and where its time went.
struct SlowAttend {
  std::string sequence;  // the longest of its sequences
  int sequence_count = 0;
  std::string model;
  int layer = 0;
  int64_t token_count = 0;        // of that sequence, which its last query sees
  int64_t query_count = 0;        // of that sequence
  double seconds = 0;             // from the request to its answer
  double wait_seconds = 0;        // of that, until its sequences' turn
  double queue_seconds = 0;       // then in the device's queue
  double device_seconds = 0;      // then on the device
  std::vector<StageTime> stages;  // of these, where the device tells them
  std::string trace;              // of the call (Caller::trace()); empty where it does not say
};

// Those that nobody has looked at yet, up to a few. Thread-safe; one that is not slow costs a look
// at the limit.
class SlowAttends {
 public:
  // seconds: from how many on an attend is slow; 0: none is.
  explicit SlowAttends(double seconds) : seconds_(seconds) {}
  void SetSeconds(double seconds) { seconds_.store(seconds, std::memory_order_relaxed); }
  bool IsSlow(double seconds) const {
    const double limit = seconds_.load(std::memory_order_relaxed);
    return limit > 0 && seconds >= limit;
  }

  // The first that came, and how many there were beside these.
  struct Some {
    static constexpr size_t kCountMax = 5;
    std::vector<SlowAttend> attends;
    int64_t more_count = 0;
  };
  struct Taken {
    Some steps;   // of decoding (JobKind::kStep)
    Some others;  // prompts, and what chooses rows
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
  // All since the last call.
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
