#pragma once

#include <string>
#include <vector>

#include "daemon/config/config.h"

namespace spillway {

// Sets spdlog's default logger: one line an event to standard error, as text
// "time level message key=value ..." or as a JSON object. REQUIRES: once,
// before threads log.
void SetUpLogging(const Config& config);

// A value of an event.
struct LogField {
  std::string key;
  std::string value;
};
enum class LogLevel { kInfo, kWarning, kError };

// Logs an event with its values. Thread-safe.
void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields = {});
inline void LogInfo(const std::string& event, const std::vector<LogField>& fields = {}) {
  Log(LogLevel::kInfo, event, fields);
}

}  // namespace spillway
