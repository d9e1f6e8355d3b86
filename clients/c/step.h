#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "host/device/step_tensors.h"
#include "host/ipc/bell.h"

namespace spillway {

// What a step's functions say that are called out of turn.
inline absl::Status StillUnanswered() {
  return absl::FailedPreconditionError("the step's last attend is not answered yet");
}
inline absl::Status NothingAsked() {
  return absl::FailedPreconditionError("the step has no attend to wait for");
}

// A decode step of an engine, wherever that is. One thread at a time.
class ClientStep {
 public:
  virtual ~ClientStep() = default;
  // Asks for an attend, for whose answer Await is called next unless this fails. An engine in
  // this process has it once this returns.
  virtual absl::Status Ask(int layer, const StepTensors& tensors) = 0;
  // As spillway_step_await; nullopt: unanswered.
  virtual std::optional<absl::Status> Await(const StepTensors& tensors,
                                            BellWaiter::Clock::time_point deadline) = 0;
  // As spillway_step_results. An error where the engine is gone.
  virtual absl::StatusOr<std::string> Results() = 0;
  // The serialised google.rpc.Status of an error that it returned; may be empty.
  virtual std::string DetailsOf(const absl::Status& status) const = 0;
};

}  // namespace spillway
