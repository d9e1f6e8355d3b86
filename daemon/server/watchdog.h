#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "host/base/mutex.h"

namespace spillway {

// While it lives, asks in a thread of its own whether the daemon serves, and beats where it does.
// Where it does not, or where the check hangs, no beat comes, and who listens for them acts.
class Watchdog {
 public:
  // Asks once a period; after a check that failed sooner, so that a passing failure costs no
  // beat's turn. Failed checks are logged, one of those that fail alike.
  Watchdog(absl::Duration period, std::function<absl::Status()> check, std::function<void()> beat);
  // Waits for a check that runs.
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
