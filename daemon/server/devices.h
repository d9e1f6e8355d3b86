#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

// A GPU of this machine by its two names: "cuda:<ordinal>" and its UUID.
struct GpuName {
  int ordinal = 0;
  std::string uuid;
};

// The ordinals of the GPUs that Config::devices names, in its order; of all
// GPUs with "auto". NOT_FOUND for one that is not among `gpus`;
// INVALID_ARGUMENT for one that is named by ordinal and UUID both.
absl::StatusOr<std::vector<int>> ChooseGpus(const std::vector<std::string>& names,
                                            const std::vector<GpuName>& gpus);

// The device that the config names; one over several GPUs if it names several
// (see CreatePlacedDevice). NOT_FOUND for a GPU that is not there;
// INVALID_ARGUMENT for one named twice; UNIMPLEMENTED for any GPU in a build
// without CUDA. arena and budget outlive the device.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Config& config, Arena* arena,
                                                   MemoryBudget* budget);

}  // namespace spillway
