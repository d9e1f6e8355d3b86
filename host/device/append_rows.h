#pragma once

#include "absl/status/status.h"
#include "host/device/device.h"

namespace spillway {

// Copies the new rows of an append, whose pages were prepared before, in parallel, and commits
// them. OUT_OF_RANGE, with nothing committed, if an element of a shared source is not finite
// (NonFiniteRowError). INVALID_ARGUMENT for GPU memory.
absl::Status AppendRows(const ModelSpec& spec, int layer, const AppendWork& work);

}  // namespace spillway
