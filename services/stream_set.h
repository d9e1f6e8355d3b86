#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/mutex.h"

namespace spillway {

// A stream in a StreamSet. These functions are called under the lock of the set, so they must not
// call it.
class OpenStream {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~OpenStream() = default;
  // The daemon is shutting down; called once. For streams that do not end by themselves.
  virtual void Drain() {}
  // Called once per sweep, about once per second. The stream ends itself if its client was silent
  // for too long.
  virtual void CheckIdle(Clock::time_point /*now*/) {}
};

// The open streams. Thread-safe.
class StreamSet {
 public:
  // count_max: for all connections together.
  explicit StreamSet(int count_max) : count_max_(count_max) {}

  // Streams that are open already stay open.
  void SetCountMax(int count_max) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    count_max_ = count_max;
  }

  // RESOURCE_EXHAUSTED, reason STREAM_COUNT_EXHAUSTED, if too many streams are open. If a drain has
  // begun, asks the stream to drain at once.
  absl::Status Add(OpenStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    if (static_cast<int>(streams_.size()) >= count_max_) {
      return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                            streams_.size(),
                            " streams are open already, the limit server.open_stream_count_max")),
                        Reason::kStreamCountExhausted,
                        {{"open_stream_count_max", absl::StrCat(count_max_)}});
    }
    streams_.insert(stream);
    if (draining_) stream->Drain();
    return absl::OkStatus();
  }
  // Adds a stream that only shows that its client is connected. It does not count towards the
  // limit.
  void AddUncounted(OpenStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    uncounted_.insert(stream);
    if (draining_) stream->Drain();
  }
  // After this returns, the stream is not called any more.
  void Remove(OpenStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    if (streams_.erase(stream) == 0) uncounted_.erase(stream);
  }
  int64_t count() const ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    return static_cast<int64_t>(streams_.size());
  }
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    draining_ = true;
    for (OpenStream* stream : streams_) stream->Drain();
    for (OpenStream* stream : uncounted_) stream->Drain();
  }
  void CheckIdle(OpenStream::Clock::time_point now) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    for (OpenStream* stream : streams_) stream->CheckIdle(now);
    for (OpenStream* stream : uncounted_) stream->CheckIdle(now);
  }

 private:
  mutable Mutex mutex_;
  int count_max_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_set<OpenStream*> streams_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<OpenStream*> uncounted_ ABSL_GUARDED_BY(mutex_);
};

// The last time that a client sent or read a message, and how long it may be idle. Not thread-safe.
class IdleTime {
 public:
  // max: 0 means forever.
  explicit IdleTime(std::chrono::duration<double> max)
      : max_(max), last_(OpenStream::Clock::now()) {}
  void Renew() { last_ = OpenStream::Clock::now(); }
  // ABORTED, reason STREAM_IDLE, if the client was silent for too long.
  absl::Status Check(OpenStream::Clock::time_point now) const {
    return Within(now) ? absl::OkStatus()
                       : Idle(absl::StrCat("the stream had no message for ", max_.count(),
                                           " seconds, the longest that a client may be silent"));
  }
  // The same for a client that should read.
  absl::Status CheckReader(OpenStream::Clock::time_point now) const {
    return Within(now) ? absl::OkStatus()
                       : Idle(absl::StrCat("the client has read nothing for ", max_.count(),
                                           " seconds, the longest that it may"));
  }

 private:
  bool Within(OpenStream::Clock::time_point now) const {
    return max_.count() == 0 || now - last_ <= max_;
  }
  absl::Status Idle(const std::string& message) const {
    return WithReason(absl::AbortedError(message), Reason::kStreamIdle,
                      {{"stream_idle_seconds", absl::StrCat(max_.count())}});
  }

  const std::chrono::duration<double> max_;
  OpenStream::Clock::time_point last_;
};

}  // namespace spillway
