#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/cuda/stream.h"

namespace spillway::cuda {

// Throws on a CUDA error, so that the test ends and its arrays are freed.
inline void Check(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

enum class Place { kGpu, kPinned };

// An array that kernels can address, on the GPU or in pinned host memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::span<const T> values, Place place = Place::kGpu)
      : size_(values.size()), place_(place) {
    const size_t bytes = values.size_bytes() + 1;  // never zero bytes
    void* data = nullptr;
    Check(place == Place::kGpu ? cudaMalloc(&data, bytes)
                               : cudaHostAlloc(&data, bytes, cudaHostAllocDefault));
    data_ = static_cast<T*>(data);
    Check(CopyToGpu(data_, values.data(), values.size_bytes()));
  }
  DeviceArray(const std::vector<T>& values, Place place = Place::kGpu)
      : DeviceArray(std::span<const T>(values), place) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
    if (place_ == Place::kGpu) {
      cudaFree(data_);
    } else {
      cudaFreeHost(data_);
    }
  }

  T* data() const { return data_; }
  // Waits for all work of the GPU, and copies the array to the host.
  std::vector<T> Fetch() const {
    Check(cudaDeviceSynchronize());
    std::vector<T> values(size_);
    Check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDefault));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
  Place place_;
};

}  // namespace spillway::cuda
