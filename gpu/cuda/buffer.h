#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "gpu/cuda/error.h"
#include "host/memory/memory_budget.h"

namespace spillway::cuda {

// Owner of GPU memory, charged to a budget. Move-only; freeing waits for the
// GPU, so owners are kept, not made anew for every use.
class DeviceBuffer {
 public:
  // RESOURCE_EXHAUSTED, from the budget or from CUDA. Contents are undefined.
  static absl::StatusOr<DeviceBuffer> Create(int64_t bytes, MemoryBudget* budget,
                                             std::string_view what);
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& o) noexcept { *this = std::move(o); }
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(reservation_, o.reservation_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) SPILLWAY_CUDA_REPORT(cudaFree(data_));
  }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryReservation reservation_;
};

// Owner of pinned host memory that every GPU can read and write in place.
class PinnedBuffer {
 public:
  static absl::StatusOr<PinnedBuffer> Create(int64_t bytes, MemoryBudget* budget,
                                             std::string_view what);
  PinnedBuffer() = default;
  PinnedBuffer(PinnedBuffer&& o) noexcept { *this = std::move(o); }
  PinnedBuffer& operator=(PinnedBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(reservation_, o.reservation_);
    return *this;
  }
  ~PinnedBuffer() {
    if (data_ != nullptr) SPILLWAY_CUDA_REPORT(cudaFreeHost(data_));
  }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryReservation reservation_;
};

}  // namespace spillway::cuda
