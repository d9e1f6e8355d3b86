#pragma once

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace spillway {

// How a daemon takes its own place (execve): the same program, arguments and process id, with
// nothing of what CUDA has left in the process. What it has to know of those before it passes
// through the environment. Not thread-safe but for Execute().
class Relaunch {
 public:
  // More within kLossWindow are refused: what ends the device each time is perhaps what is asked.
  static constexpr int kLossCountMax = 5;
  static constexpr absl::Duration kLossWindow = absl::Minutes(10);
  // The variable of the environment.
  static constexpr char kVariable[] = "SPILLWAYD_RELAUNCH";

  // What the process before has left; nothing where this one was started by somebody else.
  static Relaunch FromEnvironment();
  // The same of the variable's text; nothing where that is none of ours.
  static Relaunch FromText(const std::string& text);
  std::string ToText() const;

  // Times that a device was lost, and why the last time. 0: never.
  int64_t loss_count() const { return loss_count_; }
  const std::string& reason() const { return reason_; }
  // The devices of those before; those must be there again.
  const std::vector<std::string>& devices() const { return devices_; }
  // Times since the last loss that the devices could not be opened.
  int64_t attempt_count() const { return attempt_count_; }

  // What the successor is to know after a loss. RESOURCE_EXHAUSTED where that came too often.
  absl::Status NoteLoss(const std::string& reason, std::vector<std::string> devices,
                        absl::Time now);
  void NoteAttempt() { ++attempt_count_; }

  // Replaces the process. Returns only where the system refuses. Any thread. `signals` stay
  // blocked, so that the successor finds those that come meanwhile; no others are.
  absl::Status Execute(const sigset_t& signals) const;

 private:
  int64_t loss_count_ = 0;
  std::string reason_;
  std::vector<std::string> devices_;
  int64_t attempt_count_ = 0;
  std::vector<int64_t> losses_s_;  // since 1970, the last ones
};

}  // namespace spillway
