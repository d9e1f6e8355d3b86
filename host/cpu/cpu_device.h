#pragma once

#include <memory>

#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

struct CpuDeviceOptions {
  // Worker threads; 0: one per core that the process may use.
  int thread_count = 0;
};

// The CPU device: SIMD kernels by Highway, parallel with oneTBB. Codes are in pages of `arena`, and
// workspaces are charged to `budget`; both must outlive the device. The same job gives the same
// bits with any number of threads.
std::unique_ptr<Device> CreateCpuDevice(const CpuDeviceOptions& options, Arena* arena,
                                        MemoryBudget* budget);

}  // namespace spillway
