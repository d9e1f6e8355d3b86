#include "daemon/server/drain.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "host/base/steady_time.h"
#include "services/log/logging.h"

namespace spillway {
namespace {

// An idle gRPC client checks its connections every five seconds. A client that has not noticed the
// shutdown loses its first call to the next process.
constexpr absl::Duration kNoticeMax = absl::Seconds(6);
constexpr timespec kLook = {0, 10'000'000};
constexpr absl::Duration kTell = absl::Seconds(1);
// The pause between two log lines doubles, up to this.
constexpr absl::Duration kLogMax = absl::Minutes(1);

std::vector<LogField> Fields(const DrainProgress& progress) {
  return {{"calls", absl::StrCat(progress.open_call_count)},
          {"streams", absl::StrCat(progress.open_stream_count)},
          {"seconds_left", absl::StrFormat("%.1f", progress.seconds_left)}};
}

// Reports the progress to the service manager, if there is one.
void Tell(const ServiceManager* manager, const DrainProgress& progress) {
  if (manager == nullptr) return;
  manager->Stopping(
      absl::StrFormat("Draining: open calls: %d, open streams: %d, %.0f s left",
                      progress.open_call_count, progress.open_stream_count, progress.seconds_left),
      absl::Seconds(progress.seconds_left) + kGiveBackTime);
}

}  // namespace

void DrainAndStop(NetworkServer& server, absl::Duration grace, const sigset_t& signals,
                  const ServiceManager* manager) {
  server.BeginDrain(grace);
  DrainProgress progress = server.drain_progress();
  Tell(manager, progress);
  SteadyTime tell = After(SteadyNow(), kTell);
  SteadyTime log = tell;
  absl::Duration log_pause = kTell;
  while (progress.open() && progress.seconds_left > 0) {
    const int signal = sigtimedwait(&signals, nullptr, &kLook);
    progress = server.drain_progress();
    if (signal == SIGTERM || signal == SIGINT) {
      Log(LogLevel::kWarning, "drain_cut_short", Fields(progress));
      // From now on a signal kills the process.
      pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
      break;
    }
    const SteadyTime now = SteadyNow();
    if (now >= tell) {
      Tell(manager, progress);
      tell = After(now, kTell);
    }
    if (now >= log) {
      LogInfo("still_draining", Fields(progress));
      log_pause = std::min(2 * log_pause, kLogMax);
      log = After(now, log_pause);
    }
  }
  if (progress.open() && progress.seconds_left <= 0) {
    Log(LogLevel::kWarning, "grace_is_over", Fields(progress));
  }
  const absl::Duration left = absl::Seconds(progress.seconds_left);
  server.Stop(progress.open() ? absl::ZeroDuration() : std::min(left, kNoticeMax));
}

}  // namespace spillway
