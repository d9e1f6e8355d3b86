#include "services/log/logging.h"

#include <unistd.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "services/log/log_queue.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace spillway {
namespace {

std::atomic<bool> json_lines{false};

std::string Quoted(const std::string& value) {
  const auto replace = nlohmann::json::error_handler_t::replace;
  return nlohmann::json(value).dump(-1, ' ', false, replace);
}

// Most lines that wait for the reader of standard error. Together with kValueBytesMax this bounds
// their memory.
constexpr size_t kQueuedLineCountMax = 1024;
constexpr size_t kValueBytesMax = 4096;

std::atomic<LogQueue*> queue{nullptr};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

// The part of a line after time and level.
std::string Message(const std::string& event, const std::vector<LogField>& fields) {
  std::string line = json_lines ? absl::StrCat("\"event\":", Quoted(event)) : event;
  for (const LogField& field : fields) {
    std::string value = field.value.substr(0, kValueBytesMax);
    if (value.size() < field.value.size()) value += "...";
    if (json_lines) {
      // The pattern writes the braces, time and level around it.
      absl::StrAppend(&line, ",", Quoted(field.key), ":", Quoted(value));
    } else {
      const bool plain = !value.empty() && value.find_first_of(" \"=\n\r\t") == std::string::npos;
      absl::StrAppend(&line, " ", field.key, "=", plain ? value : Quoted(value));
    }
  }
  return line;
}

void SetDefault(std::shared_ptr<spdlog::logger> logger, const Config& config) {
  json_lines = config.log_format == LogFormat::kJson;
  logger->set_pattern(json_lines ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l",%v})"
                                 : "%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->set_level(spdlog::level::from_str(config.log_level));
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace

void SetUpLogging(const Config& config) {
  SetDefault(std::make_shared<spdlog::logger>("spillwayd",
                                              std::make_shared<spdlog::sinks::stderr_sink_mt>()),
             config);
}

void SetUpQueuedLogging(const Config& config) {
  // Never deleted, because its thread may wait forever for a reader.
  auto* const made = new LogQueue(STDERR_FILENO, kQueuedLineCountMax, [](int64_t count) {
    return Message("log_lines_dropped", {{"lines", absl::StrCat(count)}});
  });
  SetDefault(made->logger(), config);
  queue = made;
}

void SetLogLevel(const std::string& level) {
  spdlog::default_logger_raw()->set_level(spdlog::level::from_str(level));
}

int64_t DroppedLogLineCount() {
  const LogQueue* const lines = queue;
  return lines == nullptr ? 0 : lines->dropped_line_count();
}

void WaitUntilLogged(absl::Duration time) {
  LogQueue* const lines = queue;
  if (lines != nullptr) lines->WaitUntilWritten(time);
}

void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields) {
  const spdlog::level::level_enum spdlog_level = ToSpdlog(level);
  if (!spdlog::should_log(spdlog_level)) return;
  const std::string line = Message(event, fields);
  spdlog::log(spdlog_level, spdlog::string_view_t(line));
}

int CannotStart(const absl::Status& why) {
  Log(LogLevel::kError, "cannot_start", {{"error", std::string(why.message())}});
  return 1;
}

}  // namespace spillway
