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

// A decode step of a daemon's, anywhere: messages on a Decode stream of its own, one for each
// sequence and layer.
class MessageStep final : public ClientStep {
 public:
  // description: a serialised v1::DecodeStep; INVALID_ARGUMENT where it is none. What the daemon
  // refuses the first attend says. shape: of the model, the counts of which the description says.
  // client_id: of the client whose step it is.
  static absl::StatusOr<std::unique_ptr<MessageStep>> Begin(std::shared_ptr<grpc::Channel> channel,
                                                            std::string client_id,
                                                            std::string_view description,
                                                            StepShape shape);

  absl::Status Ask(int layer, const StepTensors& tensors) override;
  std::optional<absl::Status> Await(const StepTensors& tensors,
                                    BellWaiter::Clock::time_point deadline) override;
  absl::StatusOr<std::string> Results() override;
  std::string DetailsOf(const absl::Status& status) const override;

 private:
  MessageStep(std::shared_ptr<grpc::Channel> channel, std::string client_id, std::string trace,
              const StepShape& shape, DType row_dtype, std::vector<v1::DecodeRequest> requests);

  // The stream.
  void Open();
  // Makes the requests those of a layer, and what is sent of them.
  std::vector<grpc::Slice> Messages(int layer, const StepTensors& tensors);
  // Takes the answer to one of them: its outputs are written, or its failure is noted.
  absl::Status Take(const void* message, size_t size, const StepTensors& tensors);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  const std::string trace_;
  const StepShape shape_;
  const DType row_dtype_;
  // One for each sequence, like the results of the last attend.
  std::vector<v1::DecodeRequest> requests_;
  std::vector<v1::AttendResult> results_;
  v1::DecodeResponse response_;          // the one that is read
  std::unique_ptr<spillway_call> call_;  // null: the next attend opens one
  uint64_t first_id_ = 0;                // correlation id of the first sequence's message
  int unanswered_ = 0;                   // messages
};

}  // namespace spillway
