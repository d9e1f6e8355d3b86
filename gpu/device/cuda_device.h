#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "host/device/device.h"

namespace spillway {

// A GPU of this machine.
struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;  // "NVIDIA H200"
  std::string uuid;  // "GPU-..."
  int64_t memory_bytes = 0;
};

// The GPUs that CUDA sees; empty without a driver. Takes no memory on them.
std::vector<CudaDeviceInfo> ListCudaDevices();

// CudaDeviceOptions::resident_limit_bytes: seven eighths of the memory without workspaces.
inline constexpr int64_t kMostResident = std::numeric_limits<int64_t>::max();

struct CudaDeviceOptions {
  int ordinal = 0;
  // GPU memory for codes, tables and workspaces; 0: nine tenths of the free memory.
  int64_t memory_limit_bytes = 0;
  // Of this, the most for copies of all rows of some sequences (Residency), which make room for
  // codes; 0: no copies; kMostResident: as much as is allowed.
  int64_t resident_limit_bytes = 0;
  // Of this, what codes and copies leave to workspaces (WorkspaceShares); 0: by the limit.
  int64_t workspace_bytes = 0;
  // Whether answers do not depend on which copies there are. Otherwise stream steps are dense while
  // all rows are copied and that is faster (ChooseDense()).
  bool reproducible = false;
  // Host threads that copy rows; 0: one per core.
  int thread_count = 0;
};

// The CUDA device: codes, factors and tables in GPU memory, rows in pinned host memory. Pinned
// buffers are charged to host_budget, which must outlive the device. A job gives the same bits
// whatever runs at the same time. NOT_FOUND if there is no such GPU; INVALID_ARGUMENT if limits
// leave too little memory; UNIMPLEMENTED if the GPU cannot read host memory in place.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const CudaDeviceOptions& options,
                                                         MemoryBudget* host_budget);

}  // namespace spillway
