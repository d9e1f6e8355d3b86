#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "host/device/client_gpu.h"

namespace spillway {

// Maps memory of the GPU of that UUID by a handle that another process has given.
// NOT_FOUND where this process does not see the GPU; INVALID_ARGUMENT for what is no
// handle; UNIMPLEMENTED where CUDA does not map it, saying why.
absl::StatusOr<std::unique_ptr<ClientGpu>> CreateClientGpu(const std::string& uuid,
                                                           std::string_view handle);

}  // namespace spillway
