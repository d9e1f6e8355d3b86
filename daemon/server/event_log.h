#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/engine/engine.h"
#include "daemon/server/logging.h"
#include "host/base/mutex.h"

namespace spillway {

// Logs what goes wrong with calls, and what ends by itself: of each kind a few
// lines between two calls of Flush, which says how many more there were. A
// client that tries over and over fills no disk. Thread-safe.
class EventLog {
 public:
  // An error that is answered: "failed" at level error where the daemon or its
  // device is at fault, "refused" at level warning where memory or another
  // quota is, and at level info where the request is. What the client
  // cancelled, and what a daemon that ends refuses, is no news.
  // trace: of the call (Caller::trace()); empty where it does not say.
  void Refused(const absl::Status& status, const std::string& reason, std::string_view trace = {});
  // A sequence that expired: "expired" at level info.
  void Expired(const ExpiredSequence& sequence);
  // Requests to attend that took long: "slow_step" at level warning where they were of decoding,
  // "slow_attend" at level info for others, which may take long by right.
  void Slow(const SlowAttends::Taken& taken);
  // What is amiss beside calls, at level warning.
  void Warning(const std::string& event, const std::vector<LogField>& fields);
  // What a library says: "library", with the place in its source.
  void Library(LogLevel level, const std::string& library, const std::string& file, int line,
               const std::string& message);
  // Begins anew. For a timer, and for the end.
  void Flush() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Kind {
    LogLevel level = LogLevel::kInfo;
    int64_t count = 0;
  };

  void Admit(LogLevel level, const std::string& event, const std::string& kind,
             const std::vector<LogField>& fields) ABSL_LOCKS_EXCLUDED(mutex_);
  void LogSlow(LogLevel level, const std::string& event, const SlowAttends::Some& some)
      ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  // Since Flush, by event and kind.
  absl::flat_hash_map<std::string, Kind> kinds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
