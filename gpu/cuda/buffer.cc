#include "gpu/cuda/buffer.h"

namespace spillway::cuda {

int64_t DeviceAllocator::FreeBytes() {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return static_cast<int64_t>(free);
}

// CUDA does not say how much more it would pin.
int64_t PinnedAllocator::FreeBytes() { return 0; }

}  // namespace spillway::cuda
