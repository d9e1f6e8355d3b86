#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "gpu/cuda/error.h"
#include "host/memory/memory_budget.h"

namespace spillway::cuda {

// How a Buffer allocates and frees memory.
struct DeviceAllocator {
  static cudaError_t Allocate(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
  static cudaError_t Free(void* data) { return cudaFree(data); }
  // Free bytes that CUDA reports, for error messages.
  static int64_t FreeBytes();
};
struct PinnedAllocator {
  static cudaError_t Allocate(void** data, size_t bytes) {
    return cudaHostAlloc(data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  }
  static cudaError_t Free(void* data) { return cudaFreeHost(data); }
  static int64_t FreeBytes();
};

// Owner of memory that is charged to a budget. Move-only. Freeing waits for the GPU, so buffers
// should be reused.
template <typename Allocator>
class Buffer {
 public:
  // RESOURCE_EXHAUSTED, from the budget or from CUDA. Contents are undefined.
  static absl::StatusOr<Buffer> Create(int64_t bytes, MemoryBudget* budget, std::string_view what) {
    absl::StatusOr<MemoryReservation> reservation = budget->Reserve(bytes, what);
    if (!reservation.ok()) return reservation.status();
    void* data = nullptr;
    const cudaError_t error = Allocator::Allocate(&data, static_cast<size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return MemoryExhausted(what, bytes, Allocator::FreeBytes());
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(error);
    Buffer buffer;
    buffer.data_ = static_cast<std::byte*>(data);
    buffer.bytes_ = bytes;
    buffer.reservation_ = *std::move(reservation);
    return buffer;
  }
  Buffer() = default;
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(reservation_, o.reservation_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) SPILLWAY_CUDA_REPORT(Allocator::Free(data_));
  }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryReservation reservation_;
};

// GPU memory.
using DeviceBuffer = Buffer<DeviceAllocator>;
// Pinned host memory that every GPU can read and write in place.
using PinnedBuffer = Buffer<PinnedAllocator>;

}  // namespace spillway::cuda
