#include "daemon/server/helper_program.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/descriptor.h"
#include "host/base/steady_time.h"

extern char** environ;

namespace spillway {
namespace {

constexpr size_t kOutputBytesMax = 4096;

absl::Status Failed(const std::string& what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

// Owns the arguments of posix_spawn.
struct SpawnSettings {
  SpawnSettings() {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;
  ~SpawnSettings() {
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
  }
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

absl::Status WriteInput(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno != EINTR) return Failed("cannot write a program's input", errno);
    if (count > 0) text.remove_prefix(static_cast<size_t>(count));
  }
  if (lseek(fd, 0, SEEK_SET) != 0) return Failed("cannot write a program's input", errno);
  return absl::OkStatus();
}

std::string Read(int fd) {
  std::string text(kOutputBytesMax, '\0');
  const ssize_t count = pread(fd, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

// Whether the process of the pidfd `process` ends before the deadline.
bool EndsUntil(int process, SteadyTime deadline) {
  for (;;) {
    const int64_t left_ms = absl::ToInt64Milliseconds(absl::FromChrono(deadline - SteadyNow()));
    pollfd wait = {process, POLLIN, 0};
    const int count =
        poll(&wait, 1, static_cast<int>(std::clamp<int64_t>(left_ms, 0, 60 * 60 * 1000)));
    if (count > 0) return true;
    if (left_ms <= 0) return false;
  }
}

int Reap(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

absl::StatusOr<HelperResult> RunHelper(const HelperProgram& program) {
  assert(!program.arguments.empty());
  const std::string& name = program.arguments.front();
  // Files, not pipes: processes that the program leaves running may keep its output open, so a pipe
  // might never end, and a program could wait for a reader.
  const Descriptor input(memfd_create("input", MFD_CLOEXEC));
  const Descriptor output(memfd_create("output", MFD_CLOEXEC));
  if (input.get() < 0 || output.get() < 0) {
    return Failed(absl::StrCat("cannot make files for ", name), errno);
  }
  if (absl::Status status = WriteInput(input.get(), program.input); !status.ok()) return status;

  SpawnSettings settings;
  int error = posix_spawn_file_actions_adddup2(&settings.actions, input.get(), STDIN_FILENO);
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    if (error == 0) error = posix_spawn_file_actions_adddup2(&settings.actions, output.get(), fd);
  }
  // The daemon blocks the signals that it waits for, and ignores SIGPIPE. The program must not
  // inherit this.
  sigset_t none;
  sigemptyset(&none);
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  if (error == 0) error = posix_spawnattr_setsigmask(&settings.attributes, &none);
  if (error == 0) error = posix_spawnattr_setsigdefault(&settings.attributes, &pipe);
  if (error == 0) {
    error = posix_spawnattr_setflags(&settings.attributes, POSIX_SPAWN_SETSIGMASK |
                                                               POSIX_SPAWN_SETSIGDEF |
                                                               POSIX_SPAWN_SETPGROUP);
  }
  if (error != 0) return Failed(absl::StrCat("cannot run ", name), error);

  std::vector<char*> arguments;
  for (const std::string& argument : program.arguments) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const bool unset = std::any_of(
        program.unset.begin(), program.unset.end(),
        [&](const std::string& other) { return text.substr(0, text.find('=')) == other; });
    if (!unset) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  pid_t pid = -1;
  error = posix_spawnp(&pid, name.c_str(), &settings.actions, &settings.attributes,
                       arguments.data(), environment.data());
  if (error == ENOENT) return absl::NotFoundError(absl::StrCat(name, " is not in PATH"));
  if (error != 0) return Failed(absl::StrCat("cannot run ", name), error);

  HelperResult result;
  const Descriptor process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  result.ended =
      process.get() >= 0 && EndsUntil(process.get(), After(SteadyNow(), program.timeout));
  if (result.ended) {
    result.exit_status = Reap(pid);
  } else if (!program.may_go_on) {
    // Kills its whole process group.
    kill(-pid, SIGKILL);
    Reap(pid);
  }
  result.output = Read(output.get());
  return result;
}

}  // namespace spillway
