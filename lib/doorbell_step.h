#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "lib/daemon_session.h"
#include "lib/step.h"

namespace spillway {

// A decode step of a daemon on this host, through a doorbell.
class DoorbellStep final : public ClientStep {
 public:
  // Errors: those of DaemonSession::Take, those that the daemon returns, and INVALID_ARGUMENT if
  // the shape is not that of the model.
  static absl::StatusOr<std::unique_ptr<DoorbellStep>> Begin(std::shared_ptr<DaemonSession> session,
                                                             const StepDescription& description);
  ~DoorbellStep() override;

  absl::Status Ask(int layer, const StepTensors& tensors) override;
  std::optional<absl::Status> Await(const StepTensors& tensors,
                                    BellWaiter::Clock::time_point deadline) override;
  absl::StatusOr<v1::AttendResponse> Results() override;
  std::string DetailsOf(const absl::Status& status) const override { return DaemonDetails(status); }

 private:
  DoorbellStep(std::shared_ptr<DaemonSession> session, std::unique_ptr<Doorbell> doorbell,
               const StepShape& shape, DType row_dtype)
      : session_(std::move(session)),
        doorbell_(std::move(doorbell)),
        shape_(shape),
        row_dtype_(row_dtype) {}

  const std::shared_ptr<DaemonSession> session_;
  std::unique_ptr<Doorbell> doorbell_;
  const StepShape shape_;
  const DType row_dtype_;
  bool unanswered_ = false;  // an attend has no answer yet
};

}  // namespace spillway
