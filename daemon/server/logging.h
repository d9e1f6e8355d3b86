#pragma once

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
// Logs an event with its values at level info, warning or error. Thread-safe.
void LogInfo(const std::string& event, const std::vector<LogField>& fields = {});
void LogWarning(const std::string& event, const std::vector<LogField>& fields = {});
void LogError(const std::string& event, const std::vector<LogField>& fields = {});

}  // namespace spillway
