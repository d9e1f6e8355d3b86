#include <algorithm>

#include "gpu/kernels/fold.cuh"

namespace spillway::cuda {
namespace {

int Threads(int head_dim) { return std::max(128, (head_dim + 31) / 32 * 32); }

template <typename Kernel, typename... Arguments>
cudaError_t LaunchFolding(Kernel kernel, dim3 grid, int head_dim, int row_capacity,
                          cudaStream_t stream, Arguments... arguments) {
  const size_t shared = sizeof(float) * FoldFloats(head_dim, row_capacity);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  kernel<<<grid, Threads(head_dim), shared, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream) {
  const dim3 grid(kSegmentMax, wave.unit_count);
  const int d = wave.shape.head_dim;
  if (wave.shape.group <= 4) {
    return LaunchFolding(FoldKernel<4>, grid, d, 4, stream, wave.shape, phase, wave.units);
  }
  return LaunchFolding(FoldKernel<16>, grid, d, 16, stream, wave.shape, phase, wave.units);
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const dim3 grid(static_cast<int>(std::min<int64_t>(wave.segment_count_max, 65535)),
                  wave.unit_count);
  return LaunchFolding(DenseFoldKernel, grid, wave.head_dim, kDenseQueryRows, stream, wave);
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  DenseFinishKernel<<<dim3(kDenseQueryRows, wave.unit_count), 128, 0, stream>>>(wave);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
