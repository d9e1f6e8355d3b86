#include "gpu/kernels/query.cuh"

namespace spillway::cuda {

cudaError_t LaunchPrepareQuery(const Wave& wave, cudaStream_t stream) {
  const size_t shared = sizeof(float) * wave.shape.group * wave.shape.head_dim;
  PrepareQueryKernel<<<wave.unit_count, 512, shared, stream>>>(wave.shape, wave.units);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
