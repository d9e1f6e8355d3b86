#include "daemon/server/devices.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "host/cpu/cpu_device.h"
#ifdef SPILLWAY_HAS_CUDA
#include "gpu/device/cuda_device.h"
#endif

namespace spillway {
namespace {

#ifdef SPILLWAY_HAS_CUDA
absl::StatusOr<std::unique_ptr<Device>> OpenGpu(const Config& config, const CudaDeviceInfo& gpu,
                                                MemoryBudget* budget) {
  return CreateCudaDevice({.ordinal = gpu.ordinal,
                           .memory_limit_bytes = config.gpu_memory_limit_bytes,
                           .thread_count = config.thread_count},
                          budget);
}
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Config& config, Arena* arena,
                                                   MemoryBudget* budget) {
#ifdef SPILLWAY_HAS_CUDA
  if (config.device != "cpu") {
    std::vector<std::string> names;
    for (const CudaDeviceInfo& gpu : ListCudaDevices()) {
      const std::string name = absl::StrCat("cuda:", gpu.ordinal);
      if (config.device == "auto" || config.device == name || config.device == gpu.uuid) {
        return OpenGpu(config, gpu, budget);
      }
      names.push_back(absl::StrCat(name, " (", gpu.uuid, ")"));
    }
    if (config.device != "auto") {
      return absl::NotFoundError(
          absl::StrCat("device ", config.device, " is not there; CUDA sees ",
                       names.empty() ? "no GPU" : absl::StrJoin(names, ", ")));
    }
  }
#else
  if (config.device != "cpu" && config.device != "auto") {
    return absl::UnimplementedError(
        absl::StrCat("device ", config.device, ": this build is without CUDA"));
  }
#endif
  return CreateCpuDevice({.thread_count = config.thread_count}, arena, budget);
}

}  // namespace spillway
