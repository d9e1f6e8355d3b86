#pragma once

#include <atomic>
#include <csignal>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/server/relaunch.h"
#include "engine/device_watch.h"
#include "services/config/config.h"
#include "services/metrics/metrics.h"

namespace spillway {

// What a daemon does when it has lost a GPU (WhenLost), and what the process that replaces it does.
// All steps are logged. Thread-safe where a comment says so.
class LossPolicy {
 public:
  // relaunch: the state that earlier processes passed on. signals: the signals that end the daemon,
  // blocked in every thread.
  LossPolicy(Relaunch relaunch, const sigset_t& signals)
      : relaunch_(std::move(relaunch)), signals_(signals) {}

  PastLosses past() const { return {relaunch_.loss_count(), relaunch_.reason()}; }
  // After a loss, replaces "auto" by the devices of the previous process.
  void Begin(Config& config) const;
  // The daemon ends: from now on, Lost() does not replace the process. May be called by any thread.
  void End() { ending_ = true; }
  // Replaces the process. Returns if the settings do not allow this, if the daemon ends, or if it
  // fails. May be called by any thread.
  void Lost(const Config& config, const DeviceWatch::Loss& loss) const;
  // Called after a loss if the devices cannot be opened. Tries again in a new process, or returns
  // the exit code. Returns nothing if the daemon is to continue on the CPU, which `config` then
  // names.
  std::optional<int> WaitForGpu(Config& config, const absl::Status& status) const;
  // Waits until the log is written, then calls Relaunch::Execute().
  absl::Status TakePlace() const { return TakePlace(relaunch_); }

 private:
  absl::Status TakePlace(const Relaunch& relaunch) const;

  const Relaunch relaunch_;
  const sigset_t& signals_;
  std::atomic<bool> ending_{false};
};

}  // namespace spillway
