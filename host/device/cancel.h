#pragma once

#include <atomic>
#include <chrono>

#include "absl/status/status.h"

namespace spillway {

// Tells a running job to stop. Thread-safe. Devices check it repeatedly while they attend or fetch,
// the CPU device about once per 16,384 tokens that a unit scores and once per 512 rows that it
// reads. The CPU device does not check it during appends. No device reads it after the job's
// completion.
class CancelToken {
 public:
  using Clock = std::chrono::steady_clock;
  explicit CancelToken(Clock::time_point deadline = Clock::time_point::max())
      : deadline_(deadline) {}
  virtual ~CancelToken() = default;
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  virtual bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  // OK, CANCELLED or DEADLINE_EXCEEDED.
  absl::Status Check() const {
    if (cancelled()) return absl::CancelledError("the caller cancelled the request");
    if (Clock::now() >= deadline_) return absl::DeadlineExceededError("the deadline passed");
    return absl::OkStatus();
  }

 private:
  const Clock::time_point deadline_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace spillway
