#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/device/job_context.h"
#include "host/device/device.h"
#include "tbb/task_arena.h"
#include "tbb/task_group.h"

namespace spillway::cuda {

// GPU memory that other processes map by CUDA IPC. Each piece is an allocation of its own, because
// a handle opens a whole allocation. A worker frees released pieces, because cudaFree waits for the
// GPU. Thread-safe.
class SharedHeap {
 public:
  // All arguments, and gpu.name, must outlive the heap. The heap must outlive what it returns.
  SharedHeap(const Device* device, const Gpu& gpu, MemoryBudget* budget, tbb::task_arena* workers)
      : device_(device), gpu_(gpu), budget_(budget), workers_(workers) {}
  // Waits until all released memory is freed.
  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  // RESOURCE_EXHAUSTED, from the budget or from CUDA. REQUIRES: bytes is positive.
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> Allocate(int64_t bytes);
  // Allocates `bytes` of shared memory, with inputs and a stream. The same errors.
  absl::StatusOr<std::unique_ptr<DeviceExchange>> OpenExchange(int64_t bytes, int64_t input_bytes);
  int64_t used_bytes() const { return used_bytes_; }

 private:
  class Memory;
  class Exchange;

  // Frees a buffer in a worker. shared_bytes: its part of used_bytes_.
  void FreeLater(DeviceBuffer buffer, int64_t shared_bytes);

  const Device* const device_;
  const Gpu gpu_;
  MemoryBudget* const budget_;
  tbb::task_arena* const workers_;
  tbb::task_group frees_;
  std::atomic<int64_t> used_bytes_ = 0;
  std::atomic<int> busy_count_ = 0;  // threads in Exchange::Await()
};

}  // namespace spillway::cuda
