#include "gpu/kernels/query.cuh"

namespace spillway::cuda {

cudaError_t LaunchPrepareQuery(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  switch (shape.selector) {
    case Selector::kAsymmetric: {
      const dim3 grid((shape.group + 3) / 4 * 4, wave.unit_count);
      PrepareAsymmetricKernel<<<grid, shape.tiling.words * 32, 0, stream>>>(shape, wave.units);
      break;
    }
    case Selector::kHamming: {
      const size_t shared = 2 * sizeof(float) * shape.group * shape.head_dim;
      PrepareHammingKernel<<<dim3(1, wave.unit_count), 512, shared, stream>>>(shape, wave.units);
      break;
    }
    default:
      ClearUnitKernel<<<dim3(4, wave.unit_count), 256, 0, stream>>>(shape, wave.units);
  }
  return cudaGetLastError();
}

}  // namespace spillway::cuda
