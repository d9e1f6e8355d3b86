#include "bench/gpu/link/gpu.h"

#include <cuda_runtime_api.h>
#include <hwloc.h>

#include <cstdint>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<uint8_t>(uuid.bytes[i]));
  }
  return text;
}

// hwloc's logical index of the NUMA node with this number in the system; -1 if there is none.
int LogicalNode(int system_index) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return -1;
  int logical = -1;
  if (hwloc_topology_load(topology) == 0) {
    const hwloc_obj_t node =
        hwloc_get_numanode_obj_by_os_index(topology, static_cast<unsigned>(system_index));
    if (node != nullptr) logical = static_cast<int>(node->logical_index);
  }
  hwloc_topology_destroy(topology);
  return logical;
}

int NearestNode(const std::string& pci_bus_id) {
  std::ifstream file(absl::StrCat("/sys/bus/pci/devices/", pci_bus_id, "/numa_node"));
  int system_index = -1;
  // On machines with one node, the file says -1.
  if (!(file >> system_index) || system_index < 0) return -1;
  return LogicalNode(system_index);
}

// The ordinal of the GPU that `wanted` names; see OpenGpu.
absl::StatusOr<int> FindOrdinal(std::string_view wanted, const std::vector<std::string>& uuids) {
  const int count = static_cast<int>(uuids.size());
  const std::string text(wanted);
  if (text.empty()) return 0;
  if (int index = 0; absl::SimpleAtoi(text, &index)) {
    if (index >= 0 && index < count) return index;
    return absl::NotFoundError(absl::StrCat("GPU ", index, " is not in [0, ", count, ")"));
  }
  int found = -1;
  for (int i = 0; i < count; ++i) {
    if (uuids[i].rfind(text, 0) != 0) continue;
    if (found >= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("more than one GPU's UUID begins with ", text));
    }
    found = i;
  }
  if (found < 0) return absl::NotFoundError(absl::StrCat("no GPU's UUID begins with ", text));
  return found;
}

absl::Status CheckAttribute(cudaDeviceAttr attribute, int ordinal, std::string_view what) {
  int value = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&value, attribute, ordinal));
  if (value != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("GPU ", ordinal, " cannot ", std::string(what)));
}

}  // namespace

absl::StatusOr<Gpu> OpenGpu(std::string_view wanted) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver || count == 0) {
    // Without a driver, CUDA reports that the driver is too old.
    return absl::FailedPreconditionError(
        absl::StrCat("no NVIDIA GPU can be used here: ",
                     error == cudaErrorInsufficientDriver
                         ? "the NVIDIA driver is missing or older than this program's CUDA"
                         : "the driver shows none"));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(error);
  std::vector<std::string> uuids;
  std::vector<cudaDeviceProp> properties(count);
  for (int i = 0; i < count; ++i) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties[i], i));
    uuids.push_back(FormatUuid(properties[i].uuid));
  }
  const absl::StatusOr<int> ordinal = FindOrdinal(wanted, uuids);
  if (!ordinal.ok()) return ordinal.status();
  const std::pair<cudaDeviceAttr, const char*> needed[] = {
      {cudaDevAttrHostRegisterSupported, "register host memory"},
      {cudaDevAttrCanUseHostPointerForRegisteredMem, "use host memory at the host's addresses"}};
  for (const auto& [attribute, what] : needed) {
    RETURN_IF_ERROR(CheckAttribute(attribute, *ordinal, what));
  }

  const cudaDeviceProp& p = properties[*ordinal];
  Gpu gpu;
  gpu.ordinal = *ordinal;
  gpu.name = p.name;
  gpu.uuid = uuids[*ordinal];
  gpu.compute_capability_major = p.major;
  gpu.compute_capability_minor = p.minor;
  gpu.sm_count = p.multiProcessorCount;
  char pci_bus_id[32] = {};
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), *ordinal));
  gpu.pci_bus_id = absl::AsciiStrToLower(pci_bus_id);
  gpu.numa_node = NearestNode(gpu.pci_bus_id);
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDriverGetVersion(&gpu.driver_version));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaRuntimeGetVersion(&gpu.runtime_version));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaSetDevice(*ordinal));
  // Starts CUDA now, so that no timed part includes it.
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaFree(nullptr));
  return gpu;
}

}  // namespace spillway::bench
