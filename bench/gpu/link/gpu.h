#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spillway::bench {

// A GPU as the benchmark describes it.
struct Gpu {
  int ordinal = 0;
  std::string name;
  std::string uuid;        // "GPU-" and 32 hexadecimal digits, in groups
  std::string pci_bus_id;  // "0000:3b:00.0"
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int sm_count = 0;
  int numa_node = -1;       // the nearest, by hwloc logical index; -1: unknown
  int driver_version = 0;   // 1000 * major + 10 * minor, the newest CUDA that it runs
  int runtime_version = 0;  // likewise, of the CUDA that this program is built with
};

// The GPU with that index, or whose UUID begins so ("GPU-1a2b"); the first
// when `wanted` is empty. Makes it the thread's current device and starts
// CUDA on it. FAILED_PRECONDITION where no driver or GPU can be used or the
// GPU cannot address registered host memory in place, NOT_FOUND when no GPU
// is meant, INVALID_ARGUMENT when more than one is.
absl::StatusOr<Gpu> OpenGpu(std::string_view wanted);

}  // namespace spillway::bench
