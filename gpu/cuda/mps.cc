#include "gpu/cuda/mps.h"

#include <cuda_runtime_api.h>

namespace spillway::cuda {
namespace {

// A number, because the headers of CUDA 12.0 have no name for this attribute.
constexpr auto kMpsEnabled = static_cast<cudaDeviceAttr>(133);

}  // namespace

std::optional<bool> SharedByMps(int ordinal) {
  int enabled = 0;
  if (cudaDeviceGetAttribute(&enabled, kMpsEnabled, ordinal) != cudaSuccess) {
    cudaGetLastError();
    return std::nullopt;
  }
  return enabled != 0;
}

}  // namespace spillway::cuda
