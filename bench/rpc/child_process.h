// A program that runs as long as its owner does.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spillway::bench {

// Its standard input is a pipe that ends when the owner goes, however it goes.
// Not thread-safe.
class ChildProcess {
 public:
  // Starts argv[0] with these arguments. NOT_FOUND or another error when it
  // cannot be executed.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& argv);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  // Sends SIGTERM and waits until the process ended.
  ~ChildProcess();

 private:
  ChildProcess(pid_t pid, int input) : pid_(pid), input_(input) {}

  pid_t pid_;
  int input_;
};

}  // namespace spillway::bench
