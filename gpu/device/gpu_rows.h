#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"

namespace spillway::cuda {

// Rows of a caller's tensor, `name` to it, that kernels read or write in pieces of 16
// bytes. INVALID_ARGUMENT where the address is not in the GPU's memory.
absl::Status CheckInGpu(const Gpu& gpu, std::string_view name, const void* address);
// INVALID_ARGUMENT where a row is not aligned. Strides: bytes.
absl::Status CheckAligned(std::string_view name, const void* data, int64_t head_stride,
                          int64_t token_stride);

}  // namespace spillway::cuda
