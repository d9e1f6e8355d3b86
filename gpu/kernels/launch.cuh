#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>

// How kernels are launched.
namespace spillway::cuda {

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  // The kernel may begin while the previous one on the stream still runs, and waits for it
  // (GridDependencyWait). Compute capability 9.0.
  bool overlap = false;
};

// Launches kKernel, which may use all the shared memory that a block can have.
template <auto kKernel, typename... Arguments>
cudaError_t Launch(const LaunchShape& shape, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kDevicesMax = 64;
  static std::array<std::atomic<bool>, kDevicesMax> allowed{};
  // How much is allowed by default depends on the kernel's static shared memory.
  if (shape.shared_bytes > 0) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device >= kDevicesMax || !allowed[device].load()) {
      cudaFuncAttributes attributes;
      int most = 0;
      cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel);
      if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      }
      if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     most - static_cast<int>(attributes.sharedSizeBytes));
      }
      if (error != cudaSuccess) return error;
      if (device < kDevicesMax) allowed[device].store(true);
    }
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = shape.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

}  // namespace spillway::cuda
