#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "daemon/engine/engine.h"

namespace spillway {

// Once a second, in a thread of its own, as long as it lives: deletes expired
// sequences and gives memory back that stays free.
class Sweeper {
 public:
  explicit Sweeper(Engine& engine)
      : thread_([this, &engine] {
          std::unique_lock<std::mutex> lock(mutex_);
          while (!wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stopped_; })) {
            lock.unlock();
            engine.SweepExpired();
            engine.arena().GiveBackIdle();
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
