#pragma once

#include <memory>

#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

struct CpuDeviceOptions {
  // Worker threads; 0: one per core that the process may use.
  int thread_count = 0;
};

// The CPU device: SIMD kernels by Highway, parallel with oneTBB. Codes live in
// pages of `arena`; workspaces are charged to `budget`; both outlive it. The
// same job gives the same bits whatever the number of threads.
std::unique_ptr<Device> CreateCpuDevice(const CpuDeviceOptions& options, Arena* arena,
                                        MemoryBudget* budget);

}  // namespace spillway
