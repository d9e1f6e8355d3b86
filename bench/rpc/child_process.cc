#include "bench/rpc/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

extern char** environ;

namespace spillway::bench {

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& argv) {
  std::array<int, 2> input;
  if (pipe2(input.data(), O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t pid;
  const int error = posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input[0]);
  if (error != 0) {
    close(input[1]);
    return absl::ErrnoToStatus(error, absl::StrCat("cannot start ", argv[0]));
  }
  return ChildProcess(pid, input[1]);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), input_(std::exchange(other.input_, -1)) {}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  close(input_);
  kill(pid_, SIGTERM);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace spillway::bench
