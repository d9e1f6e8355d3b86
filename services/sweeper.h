#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "engine/engine.h"
#include "host/base/mutex.h"
#include "services/log/event_log.h"
#include "services/log/library_messages.h"
#include "services/log/logging.h"
#include "services/stream_set.h"

namespace spillway {

// Runs a thread that at first commits the memory that is to be ready, and that once per period
// deletes expired sequences, ends streams whose clients are silent, returns idle memory of the
// arena to the system, logs slow attends, and flushes the event logs.
class Sweeper {
 public:
  // also: further work for each turn. All references must outlive the sweeper.
  Sweeper(absl::Duration period, Engine& engine, EventLog& events, StreamSet& streams,
          std::function<void()> also)
      : period_(period),
        engine_(engine),
        events_(events),
        streams_(streams),
        also_(std::move(also)),
        thread_([this] { Run(); }) {}
  absl::Duration period() const { return period_; }
  // Time since the last turn ended.
  std::chrono::steady_clock::duration since_last_turn() const {
    return std::chrono::steady_clock::now() - last_turn_.load();
  }
  ~Sweeper() {
    {
      const MutexLock lock(mutex_);
      stopped_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_) {
    // Between two steps others get the arena.
    constexpr auto kPause = std::chrono::milliseconds(1);
    bool lacks_memory = true;
    MutexLock lock(mutex_);
    while (!stopped_) {
      const auto next = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(period_);
      while (lacks_memory && !stopped_ && std::chrono::steady_clock::now() < next) {
        lock.Unlock();
        lacks_memory = CommitReady();
        lock.Lock();
        wake_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kPause);
      }
      while (!stopped_ && wake_.WaitUntil(mutex_, next)) {
      }
      if (stopped_) return;
      lock.Unlock();
      for (const ExpiredSequence& sequence : engine_.SweepExpired()) events_.Expired(sequence);
      events_.Slow(engine_.slow_attends().Take());
      streams_.CheckIdle(std::chrono::steady_clock::now());
      engine_.arena().GiveBackIdle();
      also_();
      events_.Flush();
      FlushLibraryMessages();
      last_turn_ = std::chrono::steady_clock::now();
      lock.Lock();
    }
  }

  // Commits a part of the memory that is to be ready. Returns whether more is missing.
  bool CommitReady() {
    const absl::StatusOr<bool> more = engine_.arena().CommitReady();
    if (more.ok()) return *more;
    Log(LogLevel::kWarning, "memory.ready is not reached",
        {{"error", std::string(more.status().message())}});
    return false;
  }

  const absl::Duration period_;
  Engine& engine_;
  EventLog& events_;
  StreamSet& streams_;
  const std::function<void()> also_;
  std::atomic<std::chrono::steady_clock::time_point> last_turn_{std::chrono::steady_clock::now()};
  Mutex mutex_;
  CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
