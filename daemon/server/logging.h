#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/config/config.h"

namespace spillway {

// Sets spdlog's default logger: one line an event to standard error, as text
// "time level message key=value ..." or as a JSON object. Who logs writes.
// REQUIRES: once, before threads log.
void SetUpLogging(const Config& config);

// The same, but lines go through a LogQueue that lives as long as the process:
// nobody who logs waits. REQUIRES: SIGPIPE is ignored.
void SetUpQueuedLogging(const Config& config);
// Of the default logger, as the setting. Thread-safe.
void SetLogLevel(const std::string& level);
// Lines that were dropped since the start, for standard error was too slow or closed.
int64_t DroppedLogLineCount();
// How long the last lines of a process may take to be written.
inline constexpr absl::Duration kLastLines = absl::Seconds(1);
// Waits until what was logged before is written, so long at most. For the process's end.
void WaitUntilLogged(absl::Duration time = kLastLines);

// A value of an event. What is longer than 4 KiB is cut, and ends in "...".
struct LogField {
  std::string key;
  std::string value;
};
enum class LogLevel { kInfo, kWarning, kError };

// Logs an event with its values. Thread-safe.
void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields = {});
// Logs why a daemon does not begin to serve. Returns its exit status.
int CannotStart(const absl::Status& why);
inline void LogInfo(const std::string& event, const std::vector<LogField>& fields = {}) {
  Log(LogLevel::kInfo, event, fields);
}

}  // namespace spillway
