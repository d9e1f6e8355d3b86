#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "daemon/engine/engine.h"

namespace spillway {

// Deletes expired sequences once a second, in a thread of its own, as long as
// it lives.
class Sweeper {
 public:
  explicit Sweeper(Engine& engine)
      : thread_([this, &engine] {
          std::unique_lock<std::mutex> lock(mutex_);
          while (!wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stopped_; })) {
            lock.unlock();
            engine.SweepExpired();
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
