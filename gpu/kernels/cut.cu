#include "gpu/kernels/cut.cuh"

namespace spillway::cuda {

cudaError_t LaunchCut(const Wave& wave, cudaStream_t stream) {
  const size_t shared = sizeof(uint32_t) * wave.shape.bin_count;
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        CutKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  CutKernel<<<wave.unit_count, kCutThreads, shared, stream>>>(wave.shape, wave.units);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
