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
  const dim3 grid(kSplitMax, wave.unit_count);
  const int d = wave.shape.head_dim;
  const bool lsh = wave.lsh_tail && phase == 1;
  const auto fold = [&]<int kRows, bool kLsh>() {
    return Launch<FoldKernel<kRows, kLsh>>(Folding(grid, d, kRows, wave.overlap), stream,
                                           wave.shape, phase, wave.units);
  };
  if (wave.shape.group <= 4) {
    return lsh ? fold.template operator()<4, true>() : fold.template operator()<4, false>();
  }
  return lsh ? fold.template operator()<16, true>() : fold.template operator()<16, false>();
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const dim3 grid(static_cast<int>(std::min<int64_t>(wave.split_count_max, 65535)),
                  wave.unit_count);
  return Launch<DenseFoldKernel>(Folding(grid, wave.head_dim, kDenseQueryRows, false), stream,
                                 wave);
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{kDenseQueryRows, units}, 128}, stream, wave);
}

}  // namespace spillway::cuda
