#include "bench/gpu/link/pcie_link.h"

#include <dlfcn.h>

#include <memory>

namespace spillway::bench {
namespace {

// The parts of NVML that are used here, because not every CUDA toolkit has NVML's header. Its
// functions return 0 if they succeed.
using NvmlDevice = struct nvmlDevice_st*;
using NvmlInit = int (*)();
using NvmlDeviceByPciBusId = int (*)(const char*, NvmlDevice*);
using NvmlDeviceNumber = int (*)(NvmlDevice, unsigned*);

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};

}  // namespace

std::optional<PcieLink> ReadPcieLink(const std::string& pci_bus_id) {
  const std::unique_ptr<void, CloseLibrary> library(dlopen("libnvidia-ml.so.1", RTLD_NOW));
  if (library == nullptr) return std::nullopt;
  const auto find = [&library]<typename Function>(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library.get(), name));
    return function != nullptr;
  };
  NvmlInit init = nullptr, shutdown = nullptr;
  NvmlDeviceByPciBusId by_bus_id = nullptr;
  NvmlDeviceNumber generation_max = nullptr, width_max = nullptr;
  NvmlDeviceNumber generation = nullptr, width = nullptr;
  if (!find("nvmlInit_v2", init) || !find("nvmlShutdown", shutdown) ||
      !find("nvmlDeviceGetHandleByPciBusId_v2", by_bus_id) ||
      !find("nvmlDeviceGetMaxPcieLinkGeneration", generation_max) ||
      !find("nvmlDeviceGetMaxPcieLinkWidth", width_max) ||
      !find("nvmlDeviceGetCurrPcieLinkGeneration", generation) ||
      !find("nvmlDeviceGetCurrPcieLinkWidth", width) || init() != 0) {
    return std::nullopt;
  }
  PcieLink link;
  NvmlDevice device = nullptr;
  bool known = by_bus_id(pci_bus_id.c_str(), &device) == 0;
  const auto read = [&](NvmlDeviceNumber function, int& value) {
    unsigned number = 0;
    known = known && function(device, &number) == 0;
    value = static_cast<int>(number);
  };
  read(generation_max, link.generation_max);
  read(width_max, link.width_max);
  read(generation, link.generation);
  read(width, link.width);
  shutdown();
  // With some hypervisors, all answers are zero.
  known = known && PcieBytesPerSecond(link.generation_max, link.width_max) > 0;
  return known ? std::optional(link) : std::nullopt;
}

}  // namespace spillway::bench
