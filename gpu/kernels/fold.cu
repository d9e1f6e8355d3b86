#include "gpu/kernels/dense.cuh"
#include "gpu/kernels/fold_launch.cuh"

namespace spillway::cuda {

cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream) {
  return LaunchFoldOf<PlainLogits>(wave, phase, {}, stream);
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const dim3 grid(static_cast<int>(std::min<int64_t>(wave.split_count_max, 65535)),
                  wave.unit_count);
  return Launch<DenseFoldKernel>(
      FoldLaunch(grid, wave.head_dim, kDenseQueryRows, /*moments=*/false, false), stream, wave);
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{kDenseQueryRows, units}, 128}, stream, wave);
}

}  // namespace spillway::cuda
