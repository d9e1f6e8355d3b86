#pragma once

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "host/base/steady_time.h"

namespace spillway {

// How a daemon replaces itself (execve): the process keeps program, arguments and id, but loses all
// CUDA state. An environment variable tells the new process about earlier losses. Not thread-safe,
// except for Execute().
class Relaunch {
 public:
  // More losses within kLossWindow are refused: perhaps a request causes them each time.
  static constexpr int kLossCountMax = 5;
  static constexpr absl::Duration kLossWindow = absl::Minutes(10);
  // The environment variable.
  static constexpr char kVariable[] = "SPILLWAYD_RELAUNCH";

  // The state that the previous process passed on; empty if this process is not a relaunch.
  static Relaunch FromEnvironment();
  // The same from the text of the variable; empty if the text is not valid.
  static Relaunch FromText(const std::string& text);
  std::string ToText() const;

  // How many times a device was lost (0: never), and the reason for the last loss.
  int64_t loss_count() const { return loss_count_; }
  const std::string& reason() const { return reason_; }
  // The devices that the previous process used. The same devices must come back.
  const std::vector<std::string>& devices() const { return devices_; }
  // How many times the devices could not be opened since the last loss.
  int64_t attempt_count() const { return attempt_count_; }

  // Records a loss for the next process. RESOURCE_EXHAUSTED if there were too many recently.
  absl::Status NoteLoss(const std::string& reason, std::vector<std::string> devices,
                        SteadyTime now);
  void NoteAttempt() { ++attempt_count_; }

  // Replaces the process. Returns only if the system refuses. May be called by any thread. Exactly
  // `signals` stay blocked, so that the new process finds those that arrive in between.
  absl::Status Execute(const sigset_t& signals) const;

 private:
  int64_t loss_count_ = 0;
  std::string reason_;
  std::vector<std::string> devices_;
  int64_t attempt_count_ = 0;
  std::vector<int64_t> losses_s_;  // times of the last losses, seconds of SteadyTime
};

}  // namespace spillway
