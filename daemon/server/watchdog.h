#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "host/base/mutex.h"

namespace spillway {

// Runs a thread that checks whether the daemon serves, and calls `beat` if it does. If the check
// fails or hangs, no beat is sent, and whoever listens for beats acts.
class Watchdog {
 public:
  // Checks once per period. After a failed check it repeats sooner, so that a short failure does
  // not cost a beat. Of consecutive checks that fail with the same error, only the first is logged.
  Watchdog(absl::Duration period, std::function<absl::Status()> check, std::function<void()> beat);
  // Waits for a running check.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const absl::Duration period_;
  const std::function<absl::Status()> check_;
  const std::function<void()> beat_;
  Mutex mutex_;
  CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
