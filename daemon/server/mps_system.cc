#include "daemon/server/mps_system.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "daemon/server/helper_program.h"
#include "host/base/steady_time.h"

namespace spillway {
namespace {

constexpr char kPipeVariable[] = "CUDA_MPS_PIPE_DIRECTORY";
constexpr char kLogVariable[] = "CUDA_MPS_LOG_DIRECTORY";
// Not a directory, so CUDA finds no control daemon and continues without one.
constexpr char kNowhere[] = "/dev/null";
constexpr absl::Duration kAskTimeout = absl::Seconds(5);
constexpr absl::Duration kStartTimeout = absl::Seconds(10);
// Short, because a control daemon ends only after its last client, and this process is a client.
constexpr absl::Duration kQuitTimeout = absl::Seconds(2);
constexpr size_t kServerCountMax = 64;

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The users of the processes in a list of servers, which has one process id per line.
std::vector<int64_t> UsersOf(const std::string& list) {
  std::vector<int64_t> users;
  for (const absl::string_view line : absl::StrSplit(list, '\n')) {
    int64_t pid = 0;
    struct stat info = {};
    if (users.size() == kServerCountMax) break;
    if (!absl::SimpleAtoi(line, &pid) || pid <= 0) continue;
    // A process in another container has no entry in /proc here.
    if (stat(absl::StrCat("/proc/", pid).c_str(), &info) == 0) users.push_back(info.st_uid);
  }
  return users;
}

absl::Status MakeDirectory(const char* variable) {
  const std::string path = Variable(variable);
  if (path.empty()) return absl::OkStatus();
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot make ", variable, " ", path, ": ", error.message()));
}

class NvidiaMps final : public MpsSystem {
 public:
  std::string Directory() const override { return directory_; }

  bool HasPipe() const override {
    std::error_code error;
    return std::filesystem::exists(directory_ + "/control", error);
  }

  int64_t User() const override { return geteuid(); }

  MpsControl Ask() override { return AskFor(kAskTimeout); }

  absl::Status Start() override {
    for (const char* variable : {kPipeVariable, kLogVariable}) {
      if (absl::Status status = MakeDirectory(variable); !status.ok()) return status;
    }
    // With CUDA_VISIBLE_DEVICES it would serve only those GPUs, and number them differently.
    const absl::StatusOr<HelperResult> started = RunHelper({.arguments = {kMpsControlProgram, "-d"},
                                                            .input = "",
                                                            .unset = {"CUDA_VISIBLE_DEVICES"},
                                                            .timeout = kStartTimeout});
    if (!started.ok()) return started.status();
    if (!started->ended) {
      return absl::DeadlineExceededError(
          absl::StrCat("it had not started after ", absl::FormatDuration(kStartTimeout)));
    }
    if (started->exit_status != 0) {
      // Perhaps another process has started one in the meantime.
      if (Ask().answer == MpsAnswer::kAnswers) return absl::AlreadyExistsError("it runs already");
      return absl::FailedPreconditionError(
          absl::StrCat("exit status ", started->exit_status, ": ",
                       std::string(absl::StripAsciiWhitespace(started->output))));
    }
    for (const SteadyTime deadline = After(SteadyNow(), kAskTimeout);;) {
      const absl::Duration left = absl::FromChrono(deadline - SteadyNow());
      if (AskFor(std::max(left, absl::Milliseconds(100))).answer == MpsAnswer::kAnswers) {
        return absl::OkStatus();
      }
      if (left <= absl::ZeroDuration()) break;
      absl::SleepFor(absl::Milliseconds(50));
    }
    Quit();
    return absl::DeadlineExceededError(absl::StrCat("it was started and did not answer within ",
                                                    absl::FormatDuration(kAskTimeout),
                                                    "; its log is in ", kLogVariable));
  }

  void Quit() override {
    // If the program cannot be run, there is nobody left to report this to.
    RunHelper({.arguments = {kMpsControlProgram},
               .input = "quit\n",
               .unset = {},
               .timeout = kQuitTimeout,
               .may_go_on = true})
        .IgnoreError();
  }

  void KeepAway() override { setenv(kPipeVariable, kNowhere, 1); }

 private:
  static MpsControl AskFor(absl::Duration timeout) {
    const absl::StatusOr<HelperResult> asked = RunHelper({.arguments = {kMpsControlProgram},
                                                          .input = "get_server_list\n",
                                                          .unset = {},
                                                          .timeout = timeout});
    if (!asked.ok()) {
      return {MpsAnswer::kNoProgram, std::string(asked.status().message()), {}};
    }
    if (!asked->ended) return {MpsAnswer::kSilent, "", {}};
    if (asked->exit_status != 0) return {MpsAnswer::kAbsent, "", {}};
    return {MpsAnswer::kAnswers, "", UsersOf(asked->output)};
  }

  // Read once, because KeepAway changes the variable, which CUDA reads in its first call.
  const std::string directory_ = [] {
    const std::string directory = Variable(kPipeVariable);
    return directory.empty() ? "/tmp/nvidia-mps" : directory;
  }();
};

}  // namespace

std::unique_ptr<MpsSystem> CreateMpsSystem() { return std::make_unique<NvidiaMps>(); }

}  // namespace spillway
