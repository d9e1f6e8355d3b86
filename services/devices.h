#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "host/device/device.h"
#include "host/memory/arena.h"
#include "services/config/config.h"

namespace spillway {

// The two names of a GPU of this machine: "cuda:<ordinal>" and its UUID.
struct GpuName {
  int ordinal = 0;
  std::string uuid;
};

// The ordinals of the GPUs in Config::devices, in the same order; of all GPUs if it is "auto".
// NOT_FOUND for a name that is not among `gpus`; INVALID_ARGUMENT if one GPU is named twice, by
// ordinal and by UUID.
absl::StatusOr<std::vector<int>> ChooseGpus(const std::vector<std::string>& names,
                                            const std::vector<GpuName>& gpus);

// Opens the device that the config names. Several GPUs become one device (see CreatePlacedDevice).
// NOT_FOUND for a GPU that does not exist; INVALID_ARGUMENT for one that is named twice;
// UNIMPLEMENTED for any GPU in a build without CUDA. The budget must outlive the device, and the
// arena the models that the device creates.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Config& config, Arena* arena,
                                                   MemoryBudget* budget);

}  // namespace spillway
