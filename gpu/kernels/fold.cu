#include "gpu/kernels/dense.cuh"
#include "gpu/kernels/dense_warp.cuh"
#include "gpu/kernels/fold_coded.cuh"
#include "gpu/kernels/fold_launch.cuh"
#include "gpu/kernels/fold_tensor.cuh"

namespace spillway::cuda {
namespace {

constexpr int kStaticBytes = 2048;  // of shared memory, upper limit

// Shared memory of a block of the tensor fold, in bytes.
int TensorBytes(const RowFormat& format, int rows, bool moments) {
  const int heads = rows <= 8 ? 8 : 16;
  const int d = format.head_dim;
  return format.dtype == DType::kBF16
             ? TensorLayout<DType::kBF16>(d, heads, rows, moments, format.type).end
             : TensorLayout<DType::kF16>(d, heads, rows, moments, format.type).end;
}

// Whether a GPU's blocks have room for the tensor fold. At head_dim 256 some of compute capability
// 8.6 to 8.9 do not.
bool TensorFits(const RowFormat& format, int rows, bool moments, int block_shared_bytes) {
  return TensorFolds(format.dtype, format.head_dim) &&
         TensorBytes(format, rows, moments) + kStaticBytes <= block_shared_bytes;
}

// Calls f<dtype, query rows, tiles of dimensions, row type>().
template <typename F>
cudaError_t ForTensors(const RowFormat& format, int rows, F f) {
  const auto of_types = [&]<DType kDType, RowType kType>() {
    if (format.head_dim <= 128) {
      return rows <= 8 ? f.template operator()<kDType, 8, 2, kType>()
                       : f.template operator()<kDType, 16, 2, kType>();
    }
    return rows <= 8 ? f.template operator()<kDType, 8, 4, kType>()
                     : f.template operator()<kDType, 16, 4, kType>();
  };
  const auto of_type = [&]<DType kDType>() {
    return format.type == RowType::kInt8
               ? of_types.template operator()<kDType, RowType::kInt8>()
               : of_types.template operator()<kDType, RowType::kElements>();
  };
  return format.dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>()
                                      : of_type.template operator()<DType::kF16>();
}

// No more blocks than run at once: all warps have an equal part of the work. If there is a block
// for each split, the warps of a block share one.
cudaError_t LaunchDenseWarps(const DenseWave& wave, int64_t splits, cudaStream_t stream) {
  const int bytes = DenseWarpBytes(wave.head_dim);
  const int per_sm =
      std::clamp(wave.block_shared_bytes / (bytes + kStaticBytes), 1, kDenseWarpBlocksPerSm);
  const int64_t blocks = int64_t{per_sm} * wave.sm_count;
  const LaunchShape shape = {static_cast<unsigned>(std::min(splits, blocks)), 32 * kDenseWarps,
                             static_cast<size_t>(bytes), wave.overlap && wave.follows_append};
  const auto launch = [&]<DType kDType, int kDim>() {
    return splits <= blocks ? Launch<DenseWarpKernel<kDType, kDim, true>>(shape, stream, wave)
                            : Launch<DenseWarpKernel<kDType, kDim, false>>(shape, stream, wave);
  };
  const auto of_type = [&]<DType kDType>() {
    return wave.head_dim == 64 ? launch.template operator()<kDType, 64>()
                               : launch.template operator()<kDType, 128>();
  };
  return wave.dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>()
                                    : of_type.template operator()<DType::kF16>();
}

cudaError_t LaunchCodedFold(const Wave& wave, int phase, cudaStream_t stream) {
  const int quartets = (wave.shape.group + kCodedHeads - 1) / kCodedHeads;
  const int share = (2 * kCodedBlocksPerSm * wave.sm_count + wave.unit_count - 1) / wave.unit_count;
  const dim3 grid(std::min<int>(kSplitMax, share), wave.unit_count, quartets);
  const LaunchShape shape = {grid, kCodedThreads, static_cast<size_t>(CodedLayout(wave.shape).end),
                             wave.overlap};
  const auto launch = [&]<int kLaneDims>() {
    return Launch<FoldCodedKernel<kLaneDims>>(shape, stream, wave.shape, phase, wave.units);
  };
  return wave.shape.head_dim <= 64    ? launch.template operator()<2>()
         : wave.shape.head_dim <= 128 ? launch.template operator()<4>()
                                      : launch.template operator()<8>();
}

}  // namespace

cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  if (phase > 0 && wave.has_coded) {
    const cudaError_t error = LaunchCodedFold(wave, phase, stream);
    if (error != cudaSuccess || !wave.has_uncoded) return error;
  }
  if (!TensorFits(shape.format(), shape.group, /*moments=*/true, wave.block_shared_bytes)) {
    return LaunchFoldOf<PlainLogits>(wave, phase, {}, stream);
  }
  // As many blocks as the GPU holds at once, because each prepares its queries once for all of its
  // splits.
  const int share = (kMomentBlocksPerSm * wave.sm_count + wave.unit_count - 1) / wave.unit_count;
  const dim3 grid(std::min<int>(kSplitMax, share), wave.unit_count);
  return ForTensors(shape.format(), shape.group,
                    [&]<DType kDType, int kHeads, int kDimTiles, RowType kType>() {
                      const TensorLayout<kDType> layout(shape.head_dim, kHeads, shape.group,
                                                        /*moments=*/true, kType);
                      return Launch<FoldTensorKernel<kDType, kHeads, kDimTiles, kType>>(
                          {grid, kTensorThreads, static_cast<size_t>(layout.end), wave.overlap},
                          stream, shape, phase, wave.units);
                    });
}

cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream) {
  const int64_t splits = wave.unit_count * wave.split_count_max;
  if (!TensorFits(wave.format(), wave.query_rows_max, /*moments=*/false, wave.block_shared_bytes)) {
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>(splits, kPlainBlocksPerSm * wave.sm_count));
    return Launch<DenseFoldKernel>(
        FoldLaunch(blocks, wave.head_dim, kDenseQueryRows, /*moments=*/false,
                   wave.overlap && wave.follows_append),
        stream, wave);
  }
  if (wave.by_warps && DenseWarpBytes(wave.head_dim) + kStaticBytes <= wave.block_shared_bytes) {
    return LaunchDenseWarps(wave, splits, stream);
  }
  // No more than run at once: all have an equal part of the work.
  const int bytes = TensorBytes(wave.format(), wave.query_rows_max, /*moments=*/false);
  const int per_sm =
      std::clamp(wave.block_shared_bytes / (bytes + kStaticBytes), 1, kPlainBlocksPerSm);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(splits, per_sm * wave.sm_count));
  return ForTensors(wave.format(), wave.query_rows_max,
                    [&]<DType kDType, int kHeads, int kDimTiles, RowType kType>() {
                      const TensorLayout<kDType> layout(wave.head_dim, kHeads, wave.query_rows_max,
                                                        /*moments=*/false, kType);
                      return Launch<DenseTensorKernel<kDType, kHeads, kDimTiles, kType>>(
                          {blocks, kTensorThreads, static_cast<size_t>(layout.end),
                           wave.overlap && wave.follows_append},
                          stream, wave);
                    });
}

cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<DenseFinishKernel>({{static_cast<unsigned>(wave.query_rows_max), units},
                                    kDenseFinishThreads,
                                    /*shared_bytes=*/0,
                                    wave.overlap},
                                   stream, wave);
}

}  // namespace spillway::cuda
