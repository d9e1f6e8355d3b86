#include "daemon/server/loss_policy.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/log/logging.h"

namespace spillway {
namespace {

// How many times, and with what pause, opening a lost GPU is tried before the daemon gives up or
// continues on the CPU. Each attempt is a new process, because CUDA remembers a failed
// initialization.
constexpr int64_t kAttempts = 60;
constexpr int64_t kAttemptsBeforeCpu = 10;
constexpr timespec kAttemptPause = {.tv_sec = 1, .tv_nsec = 0};

}  // namespace

void LossPolicy::Begin(Config& config) const {
  if (relaunch_.loss_count() == 0) return;
  LogInfo("relaunched", {{"losses", absl::StrCat(relaunch_.loss_count())},
                         {"lost", relaunch_.reason()},
                         {"attempts", absl::StrCat(relaunch_.attempt_count())}});
  if (config.devices == std::vector<std::string>{"auto"}) config.devices = relaunch_.devices();
}

void LossPolicy::Lost(const Config& config, const DeviceWatch::Loss& loss) const {
  Log(LogLevel::kError, "device_lost", {{"device", loss.name}, {"error", loss.why}});
  if (ending_) return;
  if (config.when_lost == WhenLost::kStay || config.arena_directory.empty()) {
    Log(LogLevel::kError, "device_stays_lost",
        {{"advice", config.arena_directory.empty()
                        ? "rows can be fetched and saved; restart the daemon. With "
                          "memory.arena_directory it does that by itself and keeps its rows"
                        : "rows can be fetched and saved; restart the daemon"}});
    return;
  }
  Relaunch relaunch = relaunch_;
  absl::Status status =
      relaunch.NoteLoss(absl::StrCat(loss.name, ": ", loss.why), loss.parts, SteadyNow());
  if (status.ok()) {
    LogInfo("relaunching", {{"losses", absl::StrCat(relaunch.loss_count())}});
    status = TakePlace(relaunch);
  }
  Log(LogLevel::kError, "not_relaunched", {{"error", std::string(status.message())}});
}

std::optional<int> LossPolicy::WaitForGpu(Config& config, const absl::Status& status) const {
  const bool may_go_on = config.when_lost == WhenLost::kCpu;
  if (relaunch_.attempt_count() >= (may_go_on ? kAttemptsBeforeCpu : kAttempts)) {
    if (!may_go_on) return CannotStart(status);
    const std::string error(status.message());
    Log(LogLevel::kWarning, "cpu_instead", {{"lost", relaunch_.reason()}, {"error", error}});
    config.devices = {"cpu"};
    config.mps = MpsMode::kOff;
    return std::nullopt;
  }
  Log(LogLevel::kWarning, "device_not_back", {{"error", std::string(status.message())}});
  if (const int signal = sigtimedwait(&signals_, nullptr, &kAttemptPause); signal > 0) {
    LogInfo("stopped", {{"signal", absl::StrCat("SIG", sigabbrev_np(signal))}});
    return 0;
  }
  Relaunch relaunch = relaunch_;
  relaunch.NoteAttempt();
  return CannotStart(TakePlace(relaunch));
}

absl::Status LossPolicy::TakePlace(const Relaunch& relaunch) const {
  WaitUntilLogged();
  return relaunch.Execute(signals_);
}

}  // namespace spillway
