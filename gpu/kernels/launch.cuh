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
  // The kernel may begin while the one before it on the stream still runs: it
  // waits by itself (GridDependencyWait). Compute capability 9.0.
  bool overlap = false;
  // Blocks of the grid's x that run at the same time and hear from each other; more than 1:
  // compute capability 9.0.
  int cluster_blocks = 1;
};

// Clusters of up to this many blocks run on every GPU that has clusters.
inline constexpr int kPortableClusterBlocks = 8;

// A shape as the runtime takes it.
class LaunchConfig {
 public:
  LaunchConfig(const LaunchShape& shape, cudaStream_t stream) {
    config_.gridDim = shape.grid;
    config_.blockDim = dim3(shape.threads);
    config_.dynamicSmemBytes = shape.shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (shape.overlap) {
      cudaLaunchAttribute& overlap = attributes_[config_.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster_blocks > 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster_blocks), 1, 1};
    }
  }
  // Points to itself.
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

// Lets kKernel have all the shared memory that a block can have, and clusters that are not
// portable, where the shape wants them. Asks the runtime once a device.
template <auto kKernel>
cudaError_t Allow(const LaunchShape& shape) {
  // 48 KiB less what a kernel may have of its own.
  constexpr size_t kDefaultSharedBytes = 24 * 1024;
  constexpr int kDevicesMax = 64;
  enum : int { kShared = 1, kLargeCluster = 2 };
  static std::array<std::atomic<int>, kDevicesMax> allowed{};
  const int wants = (shape.shared_bytes > kDefaultSharedBytes ? kShared : 0) |
                    (shape.cluster_blocks > kPortableClusterBlocks ? kLargeCluster : 0);
  if (wants == 0) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kDevicesMax && (allowed[device].load() & wants) == wants) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  if ((wants & kShared) != 0) {
    cudaFuncAttributes attributes;
    int most = 0;
    error = cudaFuncGetAttributes(&attributes, kKernel);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   most - static_cast<int>(attributes.sharedSizeBytes));
    }
  }
  if (error == cudaSuccess && (wants & kLargeCluster) != 0) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess && device < kDevicesMax) allowed[device].fetch_or(wants);
  return error;
}

// Launches kKernel.
template <auto kKernel, typename... Arguments>
cudaError_t Launch(const LaunchShape& shape, cudaStream_t stream, const Arguments&... arguments) {
  if (const cudaError_t error = Allow<kKernel>(shape); error != cudaSuccess) return error;
  return cudaLaunchKernelEx(LaunchConfig(shape, stream).get(), kKernel, arguments...);
}

// Whether the current GPU has room for a cluster of the shape.
template <auto kKernel>
bool FitsCluster(const LaunchShape& shape) {
  int clusters = 0;
  const bool known = Allow<kKernel>(shape) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(
                         &clusters, kKernel, LaunchConfig(shape, nullptr).get()) == cudaSuccess;
  if (!known) (void)cudaGetLastError();  // no cluster of this size: not an error of what follows
  return known && clusters > 0;
}

}  // namespace spillway::cuda
