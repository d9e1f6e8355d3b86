#include "gpu/kernels/estimate.cuh"

namespace spillway::cuda {
namespace {

template <typename Kernel>
cudaError_t LaunchEstimate(Kernel kernel, const Wave& wave, cudaStream_t stream) {
  const int64_t shared = EstimateBytes(wave.shape.group, wave.shape.head_dim);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  kernel<<<wave.unit_count, kEstimateThreads, shared, stream>>>(wave.shape, wave.units);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchBudget(const Wave& wave, cudaStream_t stream) {
  return LaunchEstimate(BudgetKernel, wave, stream);
}

cudaError_t LaunchFinish(const Wave& wave, cudaStream_t stream) {
  return LaunchEstimate(FinishKernel, wave, stream);
}

}  // namespace spillway::cuda
