#pragma once

#include <atomic>
#include <chrono>

#include "absl/time/time.h"

namespace spillway {

// Settings of calls that may change while the daemon serves. New calls and sequences use the new
// values. Thread-safe, each value separately.
class CallLimits {
 public:
  struct Values {
    double ttl_seconds = 0;          // 0: forever
    double stream_idle_seconds = 0;  // 0: forever
  };
  explicit CallLimits(const Values& values) { Set(values); }

  void Set(const Values& values) {
    ttl_seconds_ = values.ttl_seconds;
    stream_idle_seconds_ = values.stream_idle_seconds;
  }

  // The ttl of sequences that name none.
  absl::Duration ttl_default() const {
    const double seconds = ttl_seconds_;
    return seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
  }
  // How long the client of an Append or an upload may send nothing, and the client of a FetchPages
  // may read nothing; 0: forever.
  std::chrono::duration<double> stream_idle_max() const {
    return std::chrono::duration<double>(stream_idle_seconds_);
  }

 private:
  std::atomic<double> ttl_seconds_;
  std::atomic<double> stream_idle_seconds_;
};

}  // namespace spillway
