#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/engine.h"
#include "host/base/mutex.h"
#include "services/log/logging.h"

namespace spillway {

// Logs errors of calls, expired sequences and slow attends. Between two calls of Flush() it logs
// only a few lines of each kind, and Flush() logs how many more there were. So a client that
// repeats an error does not fill the disk. Thread-safe.
class EventLog {
 public:
  // An error that is sent to a client. Logged as "failed" at level error if the daemon or its
  // device is at fault; as "refused" at level warning if memory or another quota is exhausted, and
  // at level info if the request is at fault. CANCELLED, and UNAVAILABLE (for example from a
  // draining daemon), are not logged.
  // trace: of the call (Caller::trace()); may be empty.
  void Refused(const absl::Status& status, const std::string& reason, std::string_view trace = {});
  // A sequence that expired: "expired" at level info.
  void Expired(const ExpiredSequence& sequence);
  // Slow requests to attend: decode steps as "slow_step" at level warning, others, which may take
  // long, as "slow_attend" at level info.
  void Slow(const SlowAttends::Taken& taken);
  // A problem that does not belong to a call, at level warning.
  void Warning(const std::string& event, const std::vector<LogField>& fields);
  // A message of a library: "library", with its file and line.
  void Library(LogLevel level, const std::string& library, const std::string& file, int line,
               const std::string& message);
  // Logs how many lines were suppressed, and resets the counts. For a timer, and for the end.
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
  // Lines since the last Flush(), by event and kind.
  absl::flat_hash_map<std::string, Kind> kinds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
