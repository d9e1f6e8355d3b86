#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "gpu/kernels/attend.h"

namespace spillway::cuda {

// Hands out pieces of a block of memory; with a null base it only measures.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    const int64_t at = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

// What one job in flight uses: a stream and memory that grows with the jobs.
// Not thread-safe; grown only while nothing runs on the stream.
class Lane {
 public:
  static absl::StatusOr<std::unique_ptr<Lane>> Create(MemoryBudget* device_budget,
                                                      MemoryBudget* host_budget);

  // At least as many bytes. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::byte*> Workspace(int64_t bytes);
  absl::StatusOr<std::byte*> Pinned(int64_t bytes);

  cudaStream_t stream() const { return stream_.get(); }
  cudaEvent_t start() const { return start_.get(); }
  cudaEvent_t done() const { return done_.get(); }
  // Pinned; not 0 asks the kernels to stop.
  int32_t* cancel() const { return reinterpret_cast<int32_t*>(cancel_.data()); }

 private:
  MemoryBudget* device_budget_ = nullptr;
  MemoryBudget* host_budget_ = nullptr;
  Stream stream_;
  Event start_, done_;
  DeviceBuffer workspace_;
  PinnedBuffer pinned_;
  PinnedBuffer cancel_;
};

}  // namespace spillway::cuda
