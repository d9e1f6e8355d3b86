#include "daemon/server/watchdog.h"

#include <chrono>
#include <string>
#include <utility>

#include "services/log/logging.h"

namespace spillway {
namespace {

constexpr int kRetries = 8;  // per period, after a failed check

}  // namespace

Watchdog::Watchdog(absl::Duration period, std::function<absl::Status()> check,
                   std::function<void()> beat)
    : period_(period),
      check_(std::move(check)),
      beat_(std::move(beat)),
      thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
}

void Watchdog::Run() {
  absl::Status last;
  for (;;) {
    const absl::Status status = check_();
    if (status.ok()) {
      beat_();
      if (!last.ok()) LogInfo("watchdog_beats_again");
    } else if (status != last) {
      Log(LogLevel::kError, "watchdog_no_beat", {{"error", std::string(status.message())}});
    }
    last = status;
    const absl::Duration pause = status.ok() ? period_ : period_ / kRetries;
    const auto next = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(pause);
    const MutexLock lock(mutex_);
    while (!stopped_ && wake_.WaitUntil(mutex_, next)) {
    }
    if (stopped_) return;
  }
}

}  // namespace spillway
