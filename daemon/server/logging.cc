#include "daemon/server/logging.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace spillway {
namespace {

std::atomic<bool> json_lines{false};

std::string Quoted(const std::string& value) {
  const auto replace = nlohmann::json::error_handler_t::replace;
  return nlohmann::json(value).dump(-1, ' ', false, replace);
}

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

}  // namespace

void SetUpLogging(const Config& config) {
  json_lines = config.log_format == LogFormat::kJson;
  auto logger = std::make_shared<spdlog::logger>("spillwayd",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern(json_lines ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l",%v})"
                                 : "%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->set_level(spdlog::level::from_str(config.log_level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

void Log(LogLevel level, const std::string& event, const std::vector<LogField>& fields) {
  const spdlog::level::level_enum spdlog_level = ToSpdlog(level);
  if (!spdlog::should_log(spdlog_level)) return;
  std::string line;
  if (json_lines) {
    // The pattern writes the braces, time and level around it.
    line = absl::StrCat("\"event\":", Quoted(event));
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",", Quoted(field.key), ":", Quoted(field.value));
    }
  } else {
    line = event;
    for (const LogField& field : fields) {
      const bool plain =
          !field.value.empty() && field.value.find_first_of(" \"=\n\r\t") == std::string::npos;
      absl::StrAppend(&line, " ", field.key, "=", plain ? field.value : Quoted(field.value));
    }
  }
  spdlog::log(spdlog_level, spdlog::string_view_t(line));
}

}  // namespace spillway
