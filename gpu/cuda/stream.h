#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"
#include "gpu/cuda/error.h"

namespace spillway::cuda {

// Copies from the host's memory to memory that GPUs read, and returns when the bytes are there.
// cudaMemcpy() returns when it has read memory that is not pinned, and no Stream waits for the
// rest.
inline cudaError_t CopyToGpu(void* to, const void* from, size_t bytes) {
  const cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}

// Owners of a stream and of an event of the current device. get() returns the cudaStream_t or
// cudaEvent_t. Move-only.
class Stream {
 public:
  // Not ordered with any other stream, not even the default stream.
  static absl::StatusOr<Stream> Create() {
    cudaStream_t stream = nullptr;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return Stream(stream);
  }
  // The same, with the highest priority on the GPU.
  static absl::StatusOr<Stream> CreateUrgent() {
    int least = 0;
    int most = 0;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceGetStreamPriorityRange(&least, &most));
    cudaStream_t stream = nullptr;
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, most));
    return Stream(stream);
  }
  Stream() = default;
  Stream(Stream&& o) noexcept : stream_(std::exchange(o.stream_, nullptr)) {}
  Stream& operator=(Stream&& o) noexcept {
    std::swap(stream_, o.stream_);
    return *this;
  }
  ~Stream() {
    if (stream_ != nullptr) SPILLWAY_CUDA_REPORT(cudaStreamDestroy(stream_));
  }
  cudaStream_t get() const { return stream_; }

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  // timing: whether cudaEventElapsedTime() can be used.
  static absl::StatusOr<Event> Create(bool timing) {
    cudaEvent_t event = nullptr;
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming));
    return Event(event);
  }
  Event() = default;
  Event(Event&& o) noexcept : event_(std::exchange(o.event_, nullptr)) {}
  Event& operator=(Event&& o) noexcept {
    std::swap(event_, o.event_);
    return *this;
  }
  ~Event() {
    if (event_ != nullptr) SPILLWAY_CUDA_REPORT(cudaEventDestroy(event_));
  }
  cudaEvent_t get() const { return event_; }

 private:
  explicit Event(cudaEvent_t event) : event_(event) {}
  cudaEvent_t event_ = nullptr;
};

}  // namespace spillway::cuda
