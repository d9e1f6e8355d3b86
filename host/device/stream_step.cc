#include "host/device/stream_step.h"

#include "absl/strings/str_cat.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<StreamStep>> Device::CreateStreamStep(DeviceModel&,
                                                                     StreamStepOptions) {
  return absl::UnimplementedError(
      absl::StrCat(info().name, " has no streams: steps on streams are for GPUs"));
}

absl::Status StreamStep::Run(StepGraph& graph, void* stream) {
  return RunByPieces(graph, stream, [&](int layer, const StepTensors& tensors) {
    return Attend(layer, tensors, stream);
  });
}

}  // namespace spillway
