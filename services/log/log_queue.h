#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace spdlog {
class logger;
namespace details {
class thread_pool;
}
}  // namespace spdlog

namespace spillway {

// A queue of spdlog lines that its own thread writes to a descriptor, so that no logging thread
// waits for a slow reader. If the queue is full, the oldest lines are dropped. Dropped lines, and
// lines that cannot be written, are counted, and a line with their number is written before the
// next line. Thread-safe.
class LogQueue {
 public:
  // dropped_line: returns the message of that line, given the number of lines lost since the last
  // one. The descriptor is not owned and not closed.
  LogQueue(int fd, size_t line_count_max, std::function<std::string(int64_t)> dropped_line);
  // Waits until all lines are written, and so for the reader.
  ~LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  // A logger that writes to this queue. The caller sets its pattern and level. The queue must
  // outlive its use.
  const std::shared_ptr<spdlog::logger>& logger() const { return logger_; }
  // Since the start.
  int64_t dropped_line_count() const;
  // Waits until all earlier lines are written; false if that takes longer than `time`.
  bool WaitUntilWritten(absl::Duration time);

 private:
  class Sink;

  std::shared_ptr<Sink> sink_;
  std::shared_ptr<spdlog::logger> logger_;
  // Declared last, so that it is destroyed first: its thread uses the other members.
  std::shared_ptr<spdlog::details::thread_pool> pool_;
};

}  // namespace spillway
