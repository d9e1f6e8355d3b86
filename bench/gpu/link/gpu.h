#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spillway::bench {

// The properties of a GPU that the benchmark uses and reports.
struct Gpu {
  int ordinal = 0;
  std::string name;
  std::string uuid;        // "GPU-" and 32 hexadecimal digits, in groups
  std::string pci_bus_id;  // "0000:3b:00.0"
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int sm_count = 0;
  int numa_node = -1;       // nearest node, as hwloc logical index; -1: unknown
  int driver_version = 0;   // newest CUDA that the driver supports: 1000 * major + 10 * minor
  int runtime_version = 0;  // the CUDA that this program is built with, in the same form
};

// Opens a GPU. `wanted` is its index or the beginning of its UUID ("GPU-1a2b"); empty: the first
// GPU. Makes the GPU the thread's current device and starts CUDA on it. FAILED_PRECONDITION if no
// driver or GPU can be used, or if the GPU cannot access registered host memory in place; NOT_FOUND
// if no GPU matches; INVALID_ARGUMENT if several match.
absl::StatusOr<Gpu> OpenGpu(std::string_view wanted);

}  // namespace spillway::bench
