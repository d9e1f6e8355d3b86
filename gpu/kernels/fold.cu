#include <algorithm>

#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {
namespace {

int Threads(int head_dim) { return std::max(128, (head_dim + 31) / 32 * 32); }

LaunchShape Folding(dim3 grid, int head_dim, int row_capacity, bool overlap) {
  return {grid, Threads(head_dim), sizeof(float) * FoldFloats(head_dim, row_capacity), overlap};
}

}  // namespace

cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream) {
  const dim3 grid(kSegmentMax, wave.unit_count);
  const int d = wave.shape.head_dim;
  if (wave.shape.group <= 4) {
    return Launch<FoldKernel<4>>(Folding(grid, d, 4, wave.overlap), stream, wave.shape, phase,
                                 wave.units);
  }
  return Launch<FoldKernel<16>>(Folding(grid, d, 16, wave.overlap), stream, wave.shape, phase,
                                wave.units);
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const dim3 grid(static_cast<int>(std::min<int64_t>(wave.segment_count_max, 65535)),
                  wave.unit_count);
  return Launch<DenseFoldKernel>(Folding(grid, wave.head_dim, kDenseQueryRows, false), stream,
                                 wave);
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{kDenseQueryRows, units}, 128}, stream, wave);
}

}  // namespace spillway::cuda
