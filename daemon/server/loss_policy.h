#pragma once

#include <csignal>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/config/config.h"
#include "daemon/engine/device_watch.h"
#include "daemon/metrics/metrics.h"
#include "daemon/server/relaunch.h"

namespace spillway {

// What a daemon does that has lost a GPU (WhenLost), and what the process does that takes its place
// then. All is logged. Thread-safe where that is said.
class LossPolicy {
 public:
  // relaunch: what the processes before have left. signals: those that end the daemon, blocked in
  // every thread.
  LossPolicy(Relaunch relaunch, const sigset_t& signals)
      : relaunch_(std::move(relaunch)), signals_(signals) {}

  PastLosses past() const { return {relaunch_.loss_count(), relaunch_.reason()}; }
  // After a loss the devices of before are asked for, and no others.
  void Begin(Config& config) const;
  // Takes the process's place. Returns where it may not or cannot. Any thread.
  void Lost(const Config& config, const DeviceWatch::Loss& loss) const;
  // After a loss, where the devices cannot be opened: tries again in another process, or returns
  // how this one ends; nothing: `config` asks for the CPU now, for the GPU stays away.
  std::optional<int> WaitForGpu(Config& config, const absl::Status& status) const;
  // As Relaunch::Execute(), once the log is written.
  absl::Status TakePlace() const { return TakePlace(relaunch_); }

 private:
  absl::Status TakePlace(const Relaunch& relaunch) const;

  const Relaunch relaunch_;
  const sigset_t& signals_;
};

}  // namespace spillway
