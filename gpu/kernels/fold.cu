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

// Whether a GPU's blocks have room for the tensor fold. At head_dim 256 some of compute capability
// 8.6 to 8.9 do not.
bool TensorFits(DType dtype, int head_dim, int rows, bool moments, int block_shared_bytes) {
  constexpr int kStaticBytes = 2048;  // upper limit
  const int heads = rows <= 8 ? 8 : 16;
  const int bytes = dtype == DType::kBF16 ? TensorLayout<DType::kBF16>(head_dim, heads, moments).end
                                          : TensorLayout<DType::kF16>(head_dim, heads, moments).end;
  return TensorFolds(dtype, head_dim) && bytes + kStaticBytes <= block_shared_bytes;
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
  if (!TensorFits(shape.dtype, shape.head_dim, shape.group, /*moments=*/true,
                  wave.block_shared_bytes)) {
    return LaunchFoldOf<PlainLogits>(wave, phase, {}, stream);
  }
  const dim3 grid(TensorBlocks(wave.sm_count, wave.unit_count, kSplitMax), wave.unit_count);
  return ForTensors(shape.dtype, shape.head_dim, shape.group,
                    [&]<DType kDType, int kHeads, int kDimTiles>() {
                      const TensorLayout<kDType> layout(shape.head_dim, kHeads, /*moments=*/true);
                      return Launch<FoldTensorKernel<kDType, kHeads, kDimTiles>>(
                          {grid, kTensorThreads, static_cast<size_t>(layout.end), wave.overlap},
                          stream, shape, phase, wave.units);
                    });
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  if (!TensorFits(wave.dtype, wave.head_dim, wave.query_rows_max, /*moments=*/false,
                  wave.block_shared_bytes)) {
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(wave.split_count_max, 65535)), units);
    return Launch<DenseFoldKernel>(
        FoldLaunch(grid, wave.head_dim, kDenseQueryRows, /*moments=*/false, false), stream, wave);
  }
  const dim3 grid(TensorBlocks(wave.sm_count, wave.unit_count, wave.split_count_max), units);
  return ForTensors(wave.dtype, wave.head_dim, wave.query_rows_max,
                    [&]<DType kDType, int kHeads, int kDimTiles>() {
                      const TensorLayout<kDType> layout(wave.head_dim, kHeads, /*moments=*/false);
                      return Launch<DenseTensorKernel<kDType, kHeads, kDimTiles>>(
                          {grid, kTensorThreads, static_cast<size_t>(layout.end)}, stream, wave);
                    });
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{kDenseQueryRows, units}, kDenseFinishThreads}, stream, wave);
}

}  // namespace spillway::cuda
