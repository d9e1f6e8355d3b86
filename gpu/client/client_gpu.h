#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "host/device/client_gpu.h"

namespace spillway {

// Maps memory of the GPU with this UUID, through a CUDA IPC handle from another process. NOT_FOUND
// if this process does not see the GPU. INVALID_ARGUMENT if `handle` has the wrong size.
// UNIMPLEMENTED, with the reason, if CUDA does not map the memory.
absl::StatusOr<std::unique_ptr<ClientGpu>> CreateClientGpu(const std::string& uuid,
                                                           std::string_view handle);

}  // namespace spillway
