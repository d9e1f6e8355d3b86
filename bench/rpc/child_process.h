// A child process that does not outlive its owner.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spillway::bench {

// The child's standard input is a pipe that closes when the owner ends, even if the owner is
// killed. Not thread-safe.
class ChildProcess {
 public:
  // Starts the program argv[0] with these arguments. NOT_FOUND or another error if it cannot be
  // executed.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& argv);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  // Sends SIGTERM and waits until the child has ended.
  ~ChildProcess();

 private:
  ChildProcess(pid_t pid, int input) : pid_(pid), input_(input) {}

  pid_t pid_;
  int input_;
};

}  // namespace spillway::bench
