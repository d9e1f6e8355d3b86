#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "host/memory/arena.h"

namespace spillway::cuda {

// GPU memory for an arena: one range of the device's address space, mapped extent by extent (CUDA's
// virtual memory management). So codes grow without a copy, and other users of the GPU can use
// memory that is not needed. Copies run on a stream of their own, and the caller waits for them.
absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateDeviceBacking(int ordinal, int64_t limit_bytes);

}  // namespace spillway::cuda
