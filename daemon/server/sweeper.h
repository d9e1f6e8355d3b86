#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "daemon/engine/engine.h"
#include "daemon/server/event_log.h"

namespace spillway {

// Once a second, in a thread of its own, as long as it lives: deletes expired
// sequences, gives memory back that stays free, and flushes the log of events.
class Sweeper {
 public:
  Sweeper(Engine& engine, EventLog& events)
      : thread_([this, &engine, &events] {
          std::unique_lock<std::mutex> lock(mutex_);
          while (!wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stopped_; })) {
            lock.unlock();
            for (const ExpiredSequence& sequence : engine.SweepExpired()) events.Expired(sequence);
            engine.arena().GiveBackIdle();
            events.Flush();
            lock.lock();
          }
        }) {}
  ~Sweeper() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace spillway
