#pragma once

#include "absl/status/status.h"
#include "host/device/step_tensors.h"

namespace spillway::cuda {

// A step's tensors in the memory of GPU `ordinal`, or managed. INVALID_ARGUMENT names one
// that is elsewhere, or one of q, k and v whose rows are not aligned to 16 bytes.
absl::Status CheckStepTensors(int ordinal, const StepTensors& tensors);

}  // namespace spillway::cuda
