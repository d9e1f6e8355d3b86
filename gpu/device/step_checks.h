#pragma once

#include "absl/status/status.h"
#include "host/device/step_tensors.h"

namespace spillway::cuda {

// Checks that a step's tensors are in the memory of GPU `ordinal` or managed. INVALID_ARGUMENT
// names one that is not, or one of q, k and v whose rows are not aligned to 16 bytes.
absl::Status CheckStepTensors(int ordinal, const StepTensors& tensors);

}  // namespace spillway::cuda
