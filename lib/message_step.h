#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/channel.h"
#include "host/base/dtype.h"
#include "host/device/step_layout.h"
#include "lib/call.h"
#include "lib/step.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// A decode step of a daemon on any host, by messages on its own Step stream.
class MessageStep final : public ClientStep {
 public:
  // client_id: id of the client that makes the step. when_unavailable: as for a call.
  // INVALID_ARGUMENT without sequences or tokens. If the daemon refuses the step, the first attend
  // returns the error.
  static absl::StatusOr<std::unique_ptr<MessageStep>> Begin(std::shared_ptr<grpc::Channel> channel,
                                                            std::string client_id,
                                                            std::function<void()> when_unavailable,
                                                            const StepDescription& description);

  absl::Status Ask(int layer, const StepTensors& tensors) override;
  std::optional<absl::Status> Await(const StepTensors& tensors,
                                    BellWaiter::Clock::time_point deadline) override;
  absl::StatusOr<v1::AttendResponse> Results() override;
  std::string DetailsOf(const absl::Status& status) const override;

 private:
  MessageStep(std::shared_ptr<grpc::Channel> channel, std::string client_id,
              std::function<void()> when_unavailable, const StepDescription& description);

  void Open();
  // The messages of a layer, serialised: as few as the limit of a message allows.
  absl::StatusOr<std::vector<grpc::Slice>> Messages(int layer, const StepTensors& tensors);
  // Stores the results of a message, and writes its outputs. complete: whether it is the last one
  // of its layer. Returns the status of the layer.
  absl::Status Take(const void* message, size_t size, const StepTensors& tensors, bool& complete);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  const std::function<void()> when_unavailable_;
  const v1::DecodeStep step_;
  const StepShape shape_;
  const DType row_dtype_;
  v1::AttendResponse results_;  // of the last attend
  v1::StepResponse response_;   // the message that is being read
  // Null: the next attend opens one. So a step that attends to nothing resets no stream, of which
  // the daemon allows a connection only so many.
  CallPointer call_;
  bool begun_ = false;  // the step was sent on this call
  bool unanswered_ = false;
  int layer_ = 0;  // of the last attend
};

}  // namespace spillway
