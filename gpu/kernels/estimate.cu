#include "gpu/kernels/estimate.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {
namespace {

// One block per query head.
LaunchShape ByHead(const Wave& wave) {
  const dim3 grid(wave.shape.group, wave.unit_count);
  return {grid, kEstimateThreads, HeadSumsBytes(wave.shape.head_dim), wave.overlap};
}

}  // namespace

cudaError_t LaunchBudget(const Wave& wave, cudaStream_t stream) {
  return Launch<BudgetKernel>(ByHead(wave), stream, wave.shape, wave.units);
}

cudaError_t LaunchFinish(const Wave& wave, cudaStream_t stream) {
  const bool draws_again = wave.has_tail && wave.tail_kernels == nullptr;
  return Launch<FinishKernel>(ByHead(wave), stream, wave.shape, draws_again, wave.step, wave.units);
}

cudaError_t LaunchFinishAgain(const Wave& wave, cudaStream_t stream) {
  return Launch<FinishAgainKernel>(ByHead(wave), stream, wave.shape, wave.step, wave.units);
}

}  // namespace spillway::cuda
