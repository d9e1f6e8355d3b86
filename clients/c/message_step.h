#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/c/call.h"
#include "clients/c/step.h"
#include "daemon/doorbell/doorbell_memory.h"
#include "grpcpp/channel.h"
#include "host/base/dtype.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// A decode step of a daemon on any host. It sends messages on its own Decode stream, one for each
// sequence and layer.
class MessageStep final : public ClientStep {
 public:
  // description: a serialised v1::DecodeStep; INVALID_ARGUMENT if it does not parse. If the daemon
  // refuses it, the first attend returns the error. shape: heads, head_dim and row_dtype of the
  // model; its counts of sequences and tokens are taken from the description. client_id: id of the
  // client that makes the step.
  static absl::StatusOr<std::unique_ptr<MessageStep>> Begin(std::shared_ptr<grpc::Channel> channel,
                                                            std::string client_id,
                                                            std::string_view description,
                                                            StepShape shape);

  absl::Status Ask(int layer, const StepTensors& tensors) override;
  std::optional<absl::Status> Await(const StepTensors& tensors,
                                    BellWaiter::Clock::time_point deadline) override;
  absl::StatusOr<v1::AttendResponse> Results() override;
  std::string DetailsOf(const absl::Status& status) const override;

 private:
  MessageStep(std::shared_ptr<grpc::Channel> channel, std::string client_id, std::string trace,
              const StepShape& shape, DType row_dtype, std::vector<v1::DecodeRequest> requests);

  // Opens the Decode stream.
  void Open();
  // Fills in the requests of a layer, and returns them serialised.
  std::vector<grpc::Slice> Messages(int layer, const StepTensors& tensors);
  // Handles the answer to one request: writes its outputs, or stores its failure in results_.
  absl::Status Take(const void* message, size_t size, const StepTensors& tensors);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  const std::string trace_;
  const StepShape shape_;
  const DType row_dtype_;
  // One for each sequence; results_ holds the results of the last attend.
  std::vector<v1::DecodeRequest> requests_;
  std::vector<v1::AttendResult> results_;
  v1::DecodeResponse response_;          // the message that is being read
  std::unique_ptr<spillway_call> call_;  // null: the next attend opens one
  uint64_t first_id_ = 0;                // correlation id of the first sequence's message
  int unanswered_ = 0;                   // messages
};

}  // namespace spillway
