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

// Lines of spdlog on their way to a descriptor, which a thread of its own writes:
// nobody who logs waits for who reads. Beyond so many lines the oldest are dropped,
// and counted; so are lines that cannot be written. Before the next line that gets
// through stands one that says how many. Thread-safe.
class LogQueue {
 public:
  // dropped_line: the message of that line, by their number since the last one.
  // Neither owns nor closes the descriptor.
  LogQueue(int fd, size_t line_count_max, std::function<std::string(int64_t)> dropped_line);
  // Waits until all is written, and so for who reads.
  ~LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  // Writes to this. Its pattern and level are the caller's to set. This outlives its use.
  const std::shared_ptr<spdlog::logger>& logger() const { return logger_; }
  // Since the start.
  int64_t dropped_line_count() const;
  // Waits until what was logged before is written; false where that takes longer.
  bool WaitUntilWritten(absl::Duration time);

 private:
  class Sink;

  std::shared_ptr<Sink> sink_;
  std::shared_ptr<spdlog::logger> logger_;
  // Last: its thread, which ends first, uses the others.
  std::shared_ptr<spdlog::details::thread_pool> pool_;
};

}  // namespace spillway
