#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "gpu/cuda/error.h"
#include "host/memory/arena.h"

namespace spillway::cuda {

// Pins the extents that an arena commits, as a device does, so that kernels can read them.
inline Arena::ExtentObserver PinExtents() {
  Arena::ExtentObserver pin;
  pin.committed = [](std::span<std::byte> extent) {
    return ToStatus(cudaHostRegister(extent.data(), extent.size(),
                                     cudaHostRegisterPortable | cudaHostRegisterMapped),
                    "cudaHostRegister");
  };
  pin.released = [](std::span<std::byte> extent) { cudaHostUnregister(extent.data()); };
  return pin;
}

}  // namespace spillway::cuda
