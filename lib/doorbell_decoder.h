#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "host/device/client_gpu.h"
#include "lib/daemon_session.h"
#include "lib/decoder.h"

namespace spillway {

// A decoder of a daemon, through a doorbell. Tensors go through memory of the daemon's GPU that
// both processes map, and each attend is a doorbell call.
class DoorbellDecoder final : public ClientDecoder {
 public:
  // description: a serialised v1::DecodeStep. Errors: those of DaemonSession::Take and of
  // MapGpuMemory, and those that the daemon returns.
  static absl::StatusOr<std::unique_ptr<DoorbellDecoder>> Open(
      std::shared_ptr<DaemonSession> session, std::string_view description,
      int64_t token_count_max);
  ~DoorbellDecoder() override;

  absl::Status Next(void* stream) override;
  uint64_t version() const override { return version_; }
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream) override;
  // Runs the pieces between the attends one by one, since each attend is a call.
  absl::Status Run(StepGraph& graph, void* stream) override;
  absl::Status Finish(void* stream) override;
  absl::StatusOr<std::string> Results(int layer) override;
  absl::StatusOr<AttendSums> Sums(int layer) override;
  int gpu() const override { return gpu_->ordinal(); }
  std::string DetailsOf(const absl::Status& status) const override { return DaemonDetails(status); }

 private:
  DoorbellDecoder(std::shared_ptr<DaemonSession> session, std::unique_ptr<Doorbell> doorbell)
      : session_(std::move(session)), doorbell_(std::move(doorbell)) {}

  // Maps the GPU memory that the daemon's answer describes.
  absl::Status Map(const DoorbellAnswer& answer);
  absl::Status Call(DoorbellCallKind kind);

  const std::shared_ptr<DaemonSession> session_;
  std::unique_ptr<Doorbell> doorbell_;
  std::unique_ptr<ClientGpu> gpu_;
  StepShape shape_ = {};
  DType row_dtype_ = DType::kF32;
  uint64_t version_ = 0;
};

}  // namespace spillway
