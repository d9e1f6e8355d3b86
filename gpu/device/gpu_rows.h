#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"

namespace spillway::cuda {

// For rows of a caller's tensor `name`, which kernels read or write in pieces of 16 bytes.
// INVALID_ARGUMENT if the address is not in the memory of this GPU.
absl::Status CheckInGpu(const Gpu& gpu, std::string_view name, const void* address);
// INVALID_ARGUMENT if rows are not aligned to 16 bytes. Strides are in bytes.
absl::Status CheckAligned(std::string_view name, const void* data, int64_t head_stride,
                          int64_t token_stride);

}  // namespace spillway::cuda
