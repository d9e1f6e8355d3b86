#include "gpu/kernels/dense.cuh"
#include "gpu/kernels/fold_launch.cuh"
#include "gpu/kernels/fold_tensor.cuh"

namespace spillway::cuda {
namespace {

// Blocks for each unit: as many as the GPU holds at once, because each prepares its queries once
// for all of its splits.
unsigned TensorBlocks(int sm_count, int unit_count, int64_t split_count_max) {
  constexpr int kBlocksPerSm = 4;
  const int share = (kBlocksPerSm * sm_count + unit_count - 1) / unit_count;
  return static_cast<unsigned>(std::min<int64_t>(split_count_max, share));
}

// Calls f<dtype, query rows, tiles of dimensions>().
template <typename F>
cudaError_t ForTensors(DType dtype, int head_dim, int rows, F f) {
  const auto of_type = [&]<DType kDType>() {
    if (head_dim <= 128) {
      return rows <= 8 ? f.template operator()<kDType, 8, 2>()
                       : f.template operator()<kDType, 16, 2>();
    }
    return rows <= 8 ? f.template operator()<kDType, 8, 4>()
                     : f.template operator()<kDType, 16, 4>();
  };
  return dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>()
                               : of_type.template operator()<DType::kF16>();
}

}  // namespace

cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  if (!TensorFolds(shape.dtype, shape.head_dim)) {
    return LaunchFoldOf<PlainLogits>(wave, phase, {}, stream);
  }
  const dim3 grid(TensorBlocks(wave.sm_count, wave.unit_count, kSplitMax), wave.unit_count);
  return ForTensors(shape.dtype, shape.head_dim, shape.group,
                    [&]<DType kDType, int kHeads, int kDimTiles>() {
                      const TensorLayout<kDType> layout(shape.head_dim, kHeads);
                      return Launch<FoldTensorKernel<kDType, kHeads, kDimTiles>>(
                          {grid, kTensorThreads, static_cast<size_t>(layout.end), wave.overlap},
                          stream, shape, phase, wave.units);
                    });
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  if (!TensorFolds(wave.dtype, wave.head_dim)) {
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(wave.split_count_max, 65535)), units);
    return Launch<DenseFoldKernel>(
        FoldLaunch(grid, wave.head_dim, kDenseQueryRows, /*moments=*/false, false), stream, wave);
  }
  const dim3 grid(TensorBlocks(wave.sm_count, wave.unit_count, wave.split_count_max), units);
  return ForTensors(wave.dtype, wave.head_dim, wave.query_rows_max,
                    [&]<DType kDType, int kHeads, int kDimTiles>() {
                      const TensorLayout<kDType> layout(wave.head_dim, kHeads);
                      return Launch<DenseTensorKernel<kDType, kHeads, kDimTiles>>(
                          {grid, kTensorThreads, static_cast<size_t>(layout.end)}, stream, wave);
                    });
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{kDenseQueryRows, units}, kDenseFinishThreads}, stream, wave);
}

}  // namespace spillway::cuda
