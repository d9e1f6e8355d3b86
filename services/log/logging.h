#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "services/config/config.h"

namespace spillway {

// Sets spdlog's default logger. It writes one line per event to standard error, as text "time level
// message key=value ..." or as a JSON object. The thread that logs writes the line. REQUIRES:
// called once, before threads log.
void SetUpLogging(const Config& config);

// The same, but lines go through a LogQueue that is never destroyed, so that no logging thread
// waits. REQUIRES: SIGPIPE is ignored.
void SetUpQueuedLogging(const Config& config);
// Sets the level of the default logger to a value of the setting log.level. Thread-safe.
void SetLogLevel(const std::string& level);
// Number of lines dropped since the start, because standard error was too slow or closed.
int64_t DroppedLogLineCount();
// Limit on the wait for the last lines of a process.
inline constexpr absl::Duration kLastLines = absl::Seconds(1);
// Waits until all earlier lines are written, but at most for `time`. For the end of the process.
void WaitUntilLogged(absl::Duration time = kLastLines);

// A value of an event. A value longer than 4 KiB is cut and ends in "...".
struct LogField {
  std::string key;
  std::string value;
};
enum class LogLevel { kInfo, kWarning, kError };

// Logs an event with its values. Thread-safe.
void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields = {});
// Logs why the daemon cannot start. Returns the exit code.
int CannotStart(const absl::Status& why);
inline void LogInfo(const std::string& event, const std::vector<LogField>& fields = {}) {
  Log(LogLevel::kInfo, event, fields);
}

}  // namespace spillway
