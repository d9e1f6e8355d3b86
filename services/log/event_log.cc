#include "services/log/event_log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace spillway {
namespace {

// Most lines of one kind between two calls of Flush().
constexpr int64_t kLineCountMax = 5;

// Adds the trace of the call, if it has one.
std::vector<LogField> WithTrace(std::vector<LogField> fields, std::string_view trace) {
  if (!trace.empty()) fields.push_back({"trace", std::string(trace)});
  return fields;
}

}  // namespace

void EventLog::Admit(LogLevel level, const std::string& event, const std::string& kind,
                     const std::vector<LogField>& fields) {
  {
    const MutexLock lock(mutex_);
    Kind& seen = kinds_[kind.empty() ? event : absl::StrCat(event, " ", kind)];
    seen.level = level;
    if (++seen.count > kLineCountMax) return;
  }
  Log(level, event, fields);
}

void EventLog::Refused(const absl::Status& status, const std::string& reason,
                       std::string_view trace) {
  std::string event = "refused";
  LogLevel level = LogLevel::kInfo;
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnavailable:
      return;
    case absl::StatusCode::kResourceExhausted:
      level = LogLevel::kWarning;
      break;
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDataLoss:
      event = "failed";
      level = LogLevel::kError;
      break;
    default:
      break;
  }
  Admit(level, event, reason,
        WithTrace({{"code", absl::StatusCodeToString(status.code())},
                   {"reason", reason},
                   {"error", std::string(status.message())}},
                  trace));
}

void EventLog::Expired(const ExpiredSequence& sequence) {
  const bool abandoned = sequence.why == ExpiredSequence::Why::kAbandoned;
  const std::string why = abandoned ? "its client is gone" : "nobody used it for its ttl";
  Admit(LogLevel::kInfo, "expired", why,
        WithTrace({{"sequence", sequence.name},
                   {"why", why},
                   {"model", sequence.model_name},
                   {"tokens", absl::StrCat(sequence.token_count)},
                   {"idle_seconds", absl::StrFormat("%.1f", absl::ToDoubleSeconds(sequence.idle))}},
                  sequence.trace));
}

void EventLog::Slow(const SlowAttends::Taken& taken) {
  LogSlow(LogLevel::kWarning, "slow_step", taken.steps);
  LogSlow(LogLevel::kInfo, "slow_attend", taken.others);
}

void EventLog::LogSlow(LogLevel level, const std::string& event, const SlowAttends::Some& some) {
  const auto milliseconds = [](double seconds) { return absl::StrFormat("%.3f", 1e3 * seconds); };
  for (const SlowAttend& attend : some.attends) {
    std::vector<LogField> fields = {{"sequence", attend.sequence},
                                    {"sequences", absl::StrCat(attend.sequence_count)},
                                    {"model", attend.model},
                                    {"layer", absl::StrCat(attend.layer)},
                                    {"tokens", absl::StrCat(attend.token_count)},
                                    {"queries", absl::StrCat(attend.query_count)},
                                    {"ms", milliseconds(attend.seconds)},
                                    {"wait_ms", milliseconds(attend.wait_seconds)},
                                    {"queue_ms", milliseconds(attend.queue_seconds)},
                                    {"device_ms", milliseconds(attend.device_seconds)}};
    for (const StageTime& stage : attend.stages) {
      fields.push_back(
          {absl::StrCat(stage.device.empty() ? "" : stage.device + "_", stage.name, "_ms"),
           milliseconds(stage.us / 1e6)});
    }
    Admit(level, event, "", WithTrace(std::move(fields), attend.trace));
  }
  if (some.more_count == 0) return;
  const MutexLock lock(mutex_);
  kinds_[event].count += some.more_count;
}

void EventLog::Warning(const std::string& event, const std::vector<LogField>& fields) {
  Admit(LogLevel::kWarning, event, "", fields);
}

void EventLog::Library(LogLevel level, const std::string& library, const std::string& file,
                       int line, const std::string& message) {
  // Errors are a separate kind, so that warnings cannot suppress them.
  Admit(level, "library", absl::StrCat(library, level == LogLevel::kError ? " error" : ""),
        {{"library", library},
         {"message", message},
         {"source", absl::StrCat(file.substr(file.rfind('/') + 1), ":", line)}});
}

void EventLog::Flush() {
  absl::flat_hash_map<std::string, Kind> kinds;
  {
    const MutexLock lock(mutex_);
    kinds = std::exchange(kinds_, {});
  }
  for (const auto& [kind, seen] : kinds) {
    if (seen.count <= kLineCountMax) continue;
    Log(seen.level, "suppressed",
        {{"kind", kind}, {"lines", absl::StrCat(seen.count - kLineCountMax)}});
  }
}

}  // namespace spillway
