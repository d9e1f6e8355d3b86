#pragma once

#include <functional>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"

namespace spillway {

// The open streams that have no end of their own, so that a drain can ask them
// to end. Thread-safe.
class StreamSet {
 public:
  // `drain` is called once, when Drain is or at once if it was; it must not
  // call the set.
  void Add(const void* stream, std::function<void()> drain) {
    const MutexLock lock(mutex_);
    if (draining_) {
      drain();
    } else {
      streams_.emplace(stream, std::move(drain));
    }
  }
  // After it returns, drain is not running and not called any more.
  void Remove(const void* stream) {
    const MutexLock lock(mutex_);
    streams_.erase(stream);
  }
  void Drain() {
    const MutexLock lock(mutex_);
    draining_ = true;
    for (const auto& [stream, drain] : streams_) drain();
    streams_.clear();
  }

 private:
  Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<const void*, std::function<void()>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
