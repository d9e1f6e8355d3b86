#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "host/memory/arena.h"

namespace spillway::cuda {

// GPU memory for an arena: one range of the device's address space, mapped
// extent by extent (CUDA's virtual memory management), so that codes grow
// without a copy and the GPU's other users keep what is not needed. Copies
// run on a stream of its own and wait.
absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateDeviceBacking(int ordinal, int64_t limit_bytes);

}  // namespace spillway::cuda
