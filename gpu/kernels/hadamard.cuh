#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/value_code.h"

// The way back from the coordinates of value codes (host/core/value_code.h).
namespace spillway::cuda {

// x = H^T x in shared memory, by threads `thread` of `threads`, which have passed a barrier since x
// was written. barrier(): one for these threads; the last one has passed when this returns.
template <typename Barrier>
__device__ inline void UndoHadamard(int dim, float* x, int thread, int threads, Barrier barrier) {
  const int size = HadamardSize(dim);
  const float scale = HadamardScale(dim);
  for (int part = HadamardCount(dim) - 1; part >= 0; --part) {
    float* const range = x + (part == 0 ? 0 : dim - size);
    for (int span = 1; span < size; span *= 2) {
      for (int i = thread; i < size / 2; i += threads) {
        float* const at = range + i / span * span * 2 + i % span;
        const float a = at[0], b = at[span];
        at[0] = a + b;
        at[span] = a - b;
      }
      barrier();
    }
    for (int i = thread; i < size; i += threads) {
      const float v = range[i] * scale;
      range[i] = HadamardNegates(part, i) ? -v : v;
    }
    barrier();
  }
}

}  // namespace spillway::cuda
