#include "gpu/kernels/estimate.cuh"

namespace spillway::cuda {

cudaError_t LaunchBudget(const Wave& wave, cudaStream_t stream) {
  const dim3 grid(wave.shape.group, wave.unit_count);
  BudgetKernel<<<grid, kEstimateThreads, 0, stream>>>(wave.shape, wave.units);
  return cudaGetLastError();
}

cudaError_t LaunchFinish(const Wave& wave, cudaStream_t stream) {
  const dim3 grid(wave.shape.group, wave.unit_count);
  FinishKernel<<<grid, kEstimateThreads, 0, stream>>>(wave.shape, wave.units);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
