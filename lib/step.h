#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/device/step_layout.h"
#include "host/ipc/bell.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// Errors of functions that are called out of order.
inline absl::Status StillUnanswered() {
  return absl::FailedPreconditionError("the step's last attend is not answered yet");
}
inline absl::Status NothingAsked() {
  return absl::FailedPreconditionError("the step has no attend to wait for");
}

// A step as a client describes it.
struct StepDescription {
  std::string_view text;  // a serialised v1::DecodeStep
  v1::DecodeStep message;
  StepShape shape;
  DType row_dtype;
};
// The shape is that of the model. INVALID_ARGUMENT if the text does not parse, or a number of the
// shape is out of range.
absl::StatusOr<StepDescription> DescriptionOf(std::string_view text, int32_t query_head_count,
                                              int32_t kv_head_count, int32_t head_dim,
                                              int32_t row_dtype);

// INVALID_ARGUMENT unless the caller's shape is that of the engine's step.
absl::Status CheckShape(const StepShape& given, const StepShape& actual);

// A decode step of an embedded engine or a daemon. Only one thread at a time may use it.
class ClientStep {
 public:
  virtual ~ClientStep() = default;
  // Asks for an attend. Unless this fails, the caller must call Await next. An engine in this
  // process has computed the answer when this returns.
  virtual absl::Status Ask(int layer, const StepTensors& tensors) = 0;
  // The same as spillway_step_await; nullopt if there is no answer yet.
  virtual std::optional<absl::Status> Await(const StepTensors& tensors,
                                            BellWaiter::Clock::time_point deadline) = 0;
  // What spillway_step_results serialises. An error if the engine is gone.
  virtual absl::StatusOr<v1::AttendResponse> Results() = 0;
  // The serialised google.rpc.Status of an error that this step returned; may be empty.
  virtual std::string DetailsOf(const absl::Status& status) const = 0;
};

}  // namespace spillway
