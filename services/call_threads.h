#pragma once

#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/mutex.h"

namespace spillway {

// One thread for each call that waits for files or computes for a long time. So these calls occupy
// neither gRPC's threads nor the workers that compute for other calls. Thread-safe.
class CallThreads {
 public:
  // what: what these calls do, for an error, such as "models are being created".
  CallThreads(int count_max, std::string what) : count_max_(count_max), what_(std::move(what)) {}
  // Waits until all threads have ended their work.
  ~CallThreads() {
    const MutexLock lock(mutex_);
    while (count_ > 0) ended_.Wait(mutex_);
  }

  // Runs `work` in its own thread. RESOURCE_EXHAUSTED, reason CALL_THREADS_EXHAUSTED, if count_max
  // threads are running already, THREADS_EXHAUSTED if no thread can be started; then `work` does
  // not run.
  absl::Status Run(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      const MutexLock lock(mutex_);
      if (count_ == count_max_) {
        return WithReason(
            absl::ResourceExhaustedError(
                absl::StrCat(count_, " ", what_,
                             " already, the most at the same time: call again when one has ended")),
            Reason::kCallThreadsExhausted);
      }
      ++count_;
    }
    try {
      std::thread([this, work = std::move(work)]() mutable {
        work();
        work = nullptr;
        End();
      }).detach();
      return absl::OkStatus();
    } catch (const std::system_error& error) {
      End();
      return WithReason(
          absl::ResourceExhaustedError(absl::StrCat("no thread could be started: ", error.what())),
          Reason::kThreadsExhausted);
    }
  }

 private:
  void End() ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    --count_;
    ended_.NotifyAll();
  }

  const int count_max_;
  const std::string what_;
  Mutex mutex_;
  CondVar ended_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace spillway
