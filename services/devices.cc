#include "services/devices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "host/cpu/cpu_device.h"
#ifdef SPILLWAY_HAS_CUDA
#include "gpu/device/cuda_device.h"
#include "host/device/placed_device.h"
#endif

namespace spillway {
namespace {

std::string OrdinalName(int ordinal) { return absl::StrCat("cuda:", ordinal); }

#ifdef SPILLWAY_HAS_CUDA
// nullptr if the setting is "auto" and there is no GPU.
absl::StatusOr<std::unique_ptr<Device>> OpenGpus(const Config& config, MemoryBudget* budget) {
  std::vector<GpuName> gpus;
  for (const CudaDeviceInfo& gpu : ListCudaDevices()) gpus.push_back({gpu.ordinal, gpu.uuid});
  const absl::StatusOr<std::vector<int>> ordinals = ChooseGpus(config.devices, gpus);
  if (!ordinals.ok()) return ordinals.status();
  if (ordinals->empty()) return nullptr;
  std::vector<std::unique_ptr<Device>> devices;
  for (const int ordinal : *ordinals) {
    absl::StatusOr<std::unique_ptr<Device>> device =
        CreateCudaDevice({.ordinal = ordinal,
                          .memory_limit_bytes = config.gpu_memory_limit_bytes,
                          .resident_limit_bytes = config.gpu_resident_limit_bytes.value_or(
                              config.gpu_memory_limit_bytes > 0 ? kMostResident : 0),
                          .workspace_bytes = config.gpu_workspace_bytes,
                          .reproducible = config.reproducible,
                          .thread_count = config.thread_count},
                         budget);
    if (!device.ok()) {
      return absl::Status(device.status().code(), absl::StrCat("device ", OrdinalName(ordinal),
                                                               ": ", device.status().message()));
    }
    devices.push_back(*std::move(device));
  }
  return CreatePlacedDevice(std::move(devices));
}
#endif

}  // namespace

absl::StatusOr<std::vector<int>> ChooseGpus(const std::vector<std::string>& names,
                                            const std::vector<GpuName>& gpus) {
  std::vector<int> ordinals;
  if (names == std::vector<std::string>{"auto"}) {
    for (const GpuName& gpu : gpus) ordinals.push_back(gpu.ordinal);
    return ordinals;
  }
  for (const std::string& name : names) {
    const auto gpu = std::find_if(gpus.begin(), gpus.end(), [&](const GpuName& gpu) {
      return name == OrdinalName(gpu.ordinal) || name == gpu.uuid;
    });
    if (gpu == gpus.end()) {
      const std::string seen = absl::StrJoin(gpus, ", ", [](std::string* out, const GpuName& gpu) {
        absl::StrAppend(out, OrdinalName(gpu.ordinal), " (", gpu.uuid, ")");
      });
      return absl::NotFoundError(absl::StrCat("there is no device ", name, "; CUDA sees ",
                                              gpus.empty() ? "no GPU" : seen));
    }
    if (std::find(ordinals.begin(), ordinals.end(), gpu->ordinal) != ordinals.end()) {
      return absl::InvalidArgumentError(absl::StrCat("device ", name, " is named twice: it is ",
                                                     OrdinalName(gpu->ordinal), " (", gpu->uuid,
                                                     ")"));
    }
    ordinals.push_back(gpu->ordinal);
  }
  return ordinals;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Config& config, Arena* arena,
                                                   MemoryBudget* budget) {
  const std::string names = absl::StrJoin(config.devices, ",");
  if (names != "cpu") {
#ifdef SPILLWAY_HAS_CUDA
    absl::StatusOr<std::unique_ptr<Device>> device = OpenGpus(config, budget);
    if (!device.ok() || *device != nullptr) return device;
#else
    if (names != "auto") {
      return absl::UnimplementedError(
          absl::StrCat("device ", names, ": this build is without CUDA"));
    }
#endif
  }
  return CreateCpuDevice({.thread_count = config.thread_count}, arena, budget);
}

}  // namespace spillway
