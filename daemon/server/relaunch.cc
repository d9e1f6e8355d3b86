#include "daemon/server/relaunch.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"

namespace spillway {
namespace {

namespace fs = std::filesystem;

constexpr char kOwnProgram[] = "/proc/self/exe";

// The command line of this process, as it was given.
std::vector<std::string> Arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!text.empty()) text.pop_back();  // each ends with a zero
  return absl::StrSplit(text, '\0');
}

// Marks all descriptors except the standard ones, also those of libraries, to be closed by execve.
void CloseOnExec() {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/fd", ignored)) {
    const int descriptor = std::atoi(entry.path().filename().c_str());
    if (descriptor > STDERR_FILENO) fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  }
}

}  // namespace

Relaunch Relaunch::FromEnvironment() {
  const char* const text = std::getenv(kVariable);
  return text == nullptr ? Relaunch() : FromText(text);
}

Relaunch Relaunch::FromText(const std::string& text) {
  Relaunch relaunch;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    relaunch.loss_count_ = json.at("losses").get<int64_t>();
    relaunch.reason_ = json.at("reason").get<std::string>();
    relaunch.devices_ = json.at("devices").get<std::vector<std::string>>();
    relaunch.attempt_count_ = json.at("attempts").get<int64_t>();
    relaunch.losses_s_ = json.at("times").get<std::vector<int64_t>>();
  } catch (const nlohmann::json::exception&) {
    return Relaunch();
  }
  return relaunch;
}

std::string Relaunch::ToText() const {
  return nlohmann::json{{"losses", loss_count_},
                        {"reason", reason_},
                        {"devices", devices_},
                        {"attempts", attempt_count_},
                        {"times", losses_s_}}
      .dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

absl::Status Relaunch::NoteLoss(const std::string& reason, std::vector<std::string> devices,
                                SteadyTime now) {
  const int64_t now_s =
      std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
  // An earlier version of the daemon wrote wall times, which are in the future here.
  std::erase_if(losses_s_, [&](int64_t loss_s) {
    return now_s - loss_s >= absl::ToInt64Seconds(kLossWindow) || loss_s > now_s;
  });
  if (losses_s_.size() >= kLossCountMax) {
    return absl::ResourceExhaustedError(absl::StrCat("a device was lost ", losses_s_.size() + 1,
                                                     " times within ",
                                                     absl::FormatDuration(kLossWindow)));
  }
  losses_s_.push_back(now_s);
  ++loss_count_;
  reason_ = reason;
  devices_ = std::move(devices);
  attempt_count_ = 0;
  return absl::OkStatus();
}

absl::Status Relaunch::Execute(const sigset_t& signals) const {
  const std::vector<std::string> arguments = Arguments();
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  // Not setenv(), because other threads may be reading the environment.
  std::string variable = absl::StrCat(kVariable, "=", ToText());
  std::vector<char*> environment = {variable.data()};
  for (char** each = environ; *each != nullptr; ++each) {
    if (!absl::StartsWith(*each, absl::StrCat(kVariable, "="))) environment.push_back(*each);
  }
  environment.push_back(nullptr);
  CloseOnExec();
  // This may be a thread of a library that has blocked other signals, which the program needs.
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);
  // Execute the file by its real path if it still exists, so that the process keeps its name.
  std::error_code error;
  if (const fs::path program = fs::read_symlink(kOwnProgram, error); !error) {
    execve(program.c_str(), argv.data(), environment.data());
  }
  execve(kOwnProgram, argv.data(), environment.data());
  return absl::InternalError(absl::StrCat("execve of ", kOwnProgram, ": ", strerror(errno)));
}

}  // namespace spillway
