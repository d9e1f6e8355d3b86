#include "services/log/log_queue.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <utility>

#include "host/base/mutex.h"
#include "spdlog/async_logger.h"
#include "spdlog/details/null_mutex.h"
#include "spdlog/details/thread_pool.h"
#include "spdlog/sinks/base_sink.h"

namespace spillway {
namespace {

// False if the text cannot be written. Does not use stdio: stdio would hold its lock as long as
// nobody reads, and the end of the process needs this lock.
bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (errno == EINTR) continue;
    // EAGAIN: another process that shares the descriptor made it non-blocking.
    if (errno != EAGAIN) return false;
    pollfd wait = {fd, POLLOUT, 0};
    poll(&wait, 1, -1);
  }
  return true;
}

}  // namespace

// Used only by the one thread of the pool, except for the counts.
class LogQueue::Sink : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  Sink(int fd, std::function<std::string(int64_t)> dropped_line)
      : fd_(fd), dropped_line_(std::move(dropped_line)) {}

  // REQUIRES: called once, before the first line.
  void SetPool(spdlog::details::thread_pool* pool) { pool_ = pool; }

  int64_t dropped_line_count() const {
    return static_cast<int64_t>(pool_->overrun_counter()) + failed_line_count_;
  }

  int64_t flush_count() ABSL_LOCKS_EXCLUDED(flush_mutex_) {
    const MutexLock lock(flush_mutex_);
    return flush_count_;
  }

  bool WaitForFlush(int64_t count, absl::Duration time) ABSL_LOCKS_EXCLUDED(flush_mutex_) {
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(time);
    const MutexLock lock(flush_mutex_);
    while (flush_count_ <= count) {
      if (!flushed_.WaitUntil(flush_mutex_, deadline)) return flush_count_ > count;
    }
    return true;
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const int64_t dropped = dropped_line_count();
    if (dropped > told_line_count_) {
      const std::string text = dropped_line_(dropped - told_line_count_);
      const spdlog::details::log_msg line(message.time, {}, message.logger_name,
                                          spdlog::level::warn, text);
      if (WriteLine(line)) told_line_count_ = dropped;
    }
    if (!WriteLine(message)) ++failed_line_count_;
  }

  void flush_() override {
    const MutexLock lock(flush_mutex_);
    ++flush_count_;
    flushed_.NotifyAll();
  }

 private:
  bool WriteLine(const spdlog::details::log_msg& message) {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    return WriteAll(fd_, std::string_view(line.data(), line.size()));
  }

  const int fd_;
  const std::function<std::string(int64_t)> dropped_line_;
  spdlog::details::thread_pool* pool_ = nullptr;
  std::atomic<int64_t> failed_line_count_{0};
  int64_t told_line_count_ = 0;
  Mutex flush_mutex_;
  CondVar flushed_;
  int64_t flush_count_ ABSL_GUARDED_BY(flush_mutex_) = 0;
};

LogQueue::LogQueue(int fd, size_t line_count_max, std::function<std::string(int64_t)> dropped_line)
    : sink_(std::make_shared<Sink>(fd, std::move(dropped_line))),
      pool_(std::make_shared<spdlog::details::thread_pool>(line_count_max, 1)) {
  sink_->SetPool(pool_.get());
  logger_ = std::make_shared<spdlog::async_logger>("spillwayd", sink_, pool_,
                                                   spdlog::async_overflow_policy::overrun_oldest);
}

LogQueue::~LogQueue() = default;

int64_t LogQueue::dropped_line_count() const { return sink_->dropped_line_count(); }

bool LogQueue::WaitUntilWritten(absl::Duration time) {
  const int64_t before = sink_->flush_count();
  // The flush goes through the queue like a line.
  logger_->flush();
  return sink_->WaitForFlush(before, time);
}

}  // namespace spillway
