// Turns SIGINT and SIGTERM into a stop request, so that commands end by
// returning and clean up after themselves.
#pragma once

#include <atomic>
#include <csignal>
#include <stop_token>
#include <thread>

namespace spillway::cli {

// Must be created before any other thread starts: SIGINT and SIGTERM stay blocked in all threads as
// long as it exists. A second signal ends the process at once, in case the cleanup hangs.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();

  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  std::stop_token token() const { return source_.get_token(); }

  // The first signal that arrived, or 0.
  int signal() const { return signal_; }

 private:
  void Wait();

  sigset_t signals_;
  sigset_t previous_;
  std::stop_source source_;
  std::atomic<int> signal_ = 0;
  std::atomic<bool> closing_ = false;
  std::thread waiter_;
};

}  // namespace spillway::cli
