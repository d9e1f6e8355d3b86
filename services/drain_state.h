#pragma once

#include <atomic>
#include <chrono>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "engine/errors.h"

namespace spillway {

// Whether the daemon drains, and how long running work may continue. Thread-safe.
class DrainState {
 public:
  using Clock = std::chrono::steady_clock;

  // Call it only once.
  void Begin(Clock::time_point deadline) {
    deadline_ = deadline;
    begun_ = true;
  }
  bool begun() const { return begun_; }
  // Seconds until the grace ends; 0 after that. REQUIRES: begun().
  double seconds_left() const {
    const std::chrono::duration<double> left = deadline_.load() - Clock::now();
    return left.count() > 0 ? left.count() : 0;
  }
  // Whether new work is accepted: OK, or UNAVAILABLE, reason DRAINING.
  absl::Status CheckNewWork() const {
    if (!begun()) return absl::OkStatus();
    return WithReason(
        absl::UnavailableError(absl::StrFormat(
            "the daemon is draining: it takes no new work, and ends in %.0f s at most",
            seconds_left())),
        Reason::kDraining, {});
  }

 private:
  std::atomic<Clock::time_point> deadline_{};
  std::atomic<bool> begun_{false};
};

}  // namespace spillway
