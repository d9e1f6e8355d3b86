#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/errors.h"
#include "host/base/mutex.h"

namespace spillway {

// A stream as the set of them sees it. What it does when asked must not call the set.
class OpenStream {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~OpenStream() = default;
  // The daemon is shutting down; asked once. For streams that have no end of their own.
  virtual void Drain() {}
  // Asked about once a second: the stream ends where its client has been silent for too long.
  virtual void CheckIdle(Clock::time_point /*now*/) {}
};

// The streams that are open. Thread-safe.
class StreamSet {
 public:
  // Of all connections together.
  explicit StreamSet(int count_max) : count_max_(count_max) {}

  // What is open beyond it stays so.
  void SetCountMax(int count_max) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    count_max_ = count_max;
  }

  // RESOURCE_EXHAUSTED, reason STREAM_COUNT_EXHAUSTED, where the most are open. Asks the stream to
  // drain at once if that has begun.
  absl::Status Add(OpenStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    if (static_cast<int>(streams_.size()) >= count_max_) {
      return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                            streams_.size(),
                            " streams are open already, the limit server.open_stream_count_max")),
                        "STREAM_COUNT_EXHAUSTED",
                        {{"open_stream_count_max", absl::StrCat(count_max_)}});
    }
    streams_.insert(stream);
    if (draining_) stream->Drain();
    return absl::OkStatus();
  }
  // The same of a stream that says no more than that its client is there.
  void AddUncounted(OpenStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    uncounted_.insert(stream);
    if (draining_) stream->Drain();
  }
  // After it returns the stream is not asked any more.
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

// When a client was heard of last, or has read last, and for how long it may do neither. Not
// thread-safe.
class IdleTime {
 public:
  // max: 0 for ever.
  explicit IdleTime(std::chrono::duration<double> max)
      : max_(max), last_(OpenStream::Clock::now()) {}
  void Renew() { last_ = OpenStream::Clock::now(); }
  // ABORTED, reason STREAM_IDLE, where it has been silent for too long.
  absl::Status Check(OpenStream::Clock::time_point now) const {
    return Within(now) ? absl::OkStatus()
                       : Idle(absl::StrCat("the stream had no message for ", max_.count(),
                                           " seconds, the longest that a client may be silent"));
  }
  // The same where it is the client that should read.
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
    return WithReason(absl::AbortedError(message), "STREAM_IDLE",
                      {{"stream_idle_seconds", absl::StrCat(max_.count())}});
  }

  const std::chrono::duration<double> max_;
  OpenStream::Clock::time_point last_;
};

}  // namespace spillway
