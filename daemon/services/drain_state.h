#pragma once

#include <atomic>
#include <chrono>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "daemon/engine/errors.h"

namespace spillway {

// Whether the daemon is about to end, and how long what runs may still run. Thread-safe.
class DrainState {
 public:
  using Clock = std::chrono::steady_clock;

  // Once.
  void Begin(Clock::time_point deadline) {
    deadline_ = deadline;
    begun_ = true;
  }
  bool begun() const { return begun_; }
  // 0 once that is over. REQUIRES: begun.
  double seconds_left() const {
    const std::chrono::duration<double> left = deadline_.load() - Clock::now();
    return left.count() > 0 ? left.count() : 0;
  }
  // What new work is answered with: OK, or UNAVAILABLE, reason DRAINING.
  absl::Status CheckNewWork() const {
    if (!begun()) return absl::OkStatus();
    return WithReason(
        absl::UnavailableError(absl::StrFormat(
            "the daemon is draining: it takes no new work, and ends in %.0f s at most",
            seconds_left())),
        "DRAINING", {});
  }

 private:
  std::atomic<Clock::time_point> deadline_{};
  std::atomic<bool> begun_{false};
};

}  // namespace spillway
