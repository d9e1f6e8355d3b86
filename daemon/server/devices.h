#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

// The device that the config names. NOT_FOUND for a GPU that is not there;
// UNIMPLEMENTED for any GPU in a build without CUDA. arena and budget outlive
// the device.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Config& config, Arena* arena,
                                                   MemoryBudget* budget);

}  // namespace spillway
