#include "services/log/library_messages.h"

#include <string_view>

#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#include "services/log/event_log.h"

namespace spillway {
namespace {

// How long to wait until the last message before an abort is written.
constexpr absl::Duration kLastWords = absl::Milliseconds(200);

// Never deleted, because libraries log until the process ends.
EventLog& Events() {
  static auto* const events = new EventLog;
  return *events;
}

void LogGrpc(gpr_log_func_args* args) {
  const std::string_view message(args->message);
  // GPR_ASSERT logs this before it aborts.
  const bool fatal = message.starts_with("assertion failed");
  LogLevel level = LogLevel::kInfo;
  if (args->severity == GPR_LOG_SEVERITY_ERROR) level = LogLevel::kWarning;
  if (fatal) level = LogLevel::kError;
  Events().Library(level, "grpc", args->file, args->line, std::string(message));
  if (fatal) WaitUntilLogged(kLastWords);
}

void LogProtobuf(google::protobuf::LogLevel severity, const char* file, int line,
                 const std::string& message) {
  const bool fatal = severity == google::protobuf::LOGLEVEL_FATAL;
  LogLevel level = LogLevel::kWarning;
  if (severity == google::protobuf::LOGLEVEL_INFO) level = LogLevel::kInfo;
  if (fatal) level = LogLevel::kError;
  Events().Library(level, "protobuf", file, line, message);
  if (fatal) WaitUntilLogged(kLastWords);
}

}  // namespace

void LogLibraryMessages() {
  gpr_set_log_function(LogGrpc);
  google::protobuf::SetLogHandler(LogProtobuf);
}

void FlushLibraryMessages() { Events().Flush(); }

}  // namespace spillway
