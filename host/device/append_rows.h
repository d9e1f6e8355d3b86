#pragma once

#include "absl/status/status.h"
#include "host/device/device.h"

namespace spillway {

// Copies what an append brings into its rows, prepared before, in parallel,
// and commits them. OUT_OF_RANGE, nothing committed, for what is not finite in
// a shared source (NonFiniteRowError).
absl::Status AppendRows(const ModelSpec& spec, int layer, const AppendWork& work);

}  // namespace spillway
