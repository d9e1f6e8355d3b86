#include <algorithm>

#include "gpu/kernels/encode.cuh"
#include "gpu/kernels/encode_page.cuh"
#include "gpu/kernels/first_pages.cuh"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/step_append.cuh"

namespace spillway::cuda {
namespace {

template <typename T>
void RunCentre(const EncodeWork& work, int64_t token_count, cudaStream_t stream) {
  // Narrow blocks, so that the few threads run on many SMs.
  constexpr int kThreads = 32;
  const dim3 grid((work.head_dim + kThreads - 1) / kThreads, work.kv_head_count);
  CentreKernel<T><<<grid, kThreads, 0, stream>>>(work, token_count);
}

// Asks for as much shared memory as an SM has. Every call does it: the attribute is per device, and
// setting it is cheap.
template <typename Kernel>
cudaError_t PreferShared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// radii: null, or [H][pages][kPageTokenCount], with value_centres [H][pages][d]; both are filled in
// place of the norms.
cudaError_t RunPages(const EncodeWork& work, const RotationWeights& weights, const HeadIndex& heads,
                     float* radii, float* value_centres, cudaStream_t stream) {
  if (work.end <= work.begin) return cudaSuccess;
  const auto pages = static_cast<unsigned>((work.end - work.begin) / kPageTokenCount);
  const auto kv_heads = static_cast<unsigned>(work.kv_head_count);
  const auto shared = static_cast<size_t>(EncodePageSharedBytes(work.head_dim));
  if (const cudaError_t error = PreferShared(EncodePageKernel); error != cudaSuccess) return error;
  return Launch<EncodePageKernel>({{pages, kv_heads}, kPageThreads, shared}, stream, work, weights,
                                  PageCoding::Of(work.tiling, work.head_dim, weights.bits_per_dim),
                                  heads, radii, value_centres);
}

cudaError_t RunFirstPages(const EncodeWork& work, const RotationWeights& weights,
                          const HeadIndex& heads, float* scratch, cudaStream_t stream) {
  // Two tokens per warp: rows may be in host memory, and a warp waits for each of them.
  constexpr unsigned kDistanceBlocks = 64;
  constexpr int kDistanceThreads = 256;
  static_assert(kDistanceBlocks % kFirstPageCount == 0);
  const auto kv_heads = static_cast<unsigned>(work.kv_head_count);
  float* const radii = scratch;
  float* const distances = radii + kv_heads * kCentreTokenCount;
  float* const value_centres = distances + kv_heads * kCentreTokenCount;
  cudaError_t error = RunPages(work, weights, heads, radii, value_centres, stream);
  if (error == cudaSuccess) {
    error = Launch<ValueDistancesKernel>({{kDistanceBlocks, kv_heads}, kDistanceThreads}, stream,
                                         work, value_centres, distances);
  }
  if (error == cudaSuccess) {
    error = Launch<StatisticsKernel>({{kv_heads}, kStatisticsThreads}, stream, work, radii,
                                     value_centres, distances, heads);
  }
  return error;
}

}  // namespace

cudaError_t LaunchCentre(const EncodeWork& work, int64_t token_count, cudaStream_t stream) {
  switch (work.dtype) {
    case DType::kF32:
      RunCentre<float>(work, token_count, stream);
      break;
    case DType::kF16:
      RunCentre<__half>(work, token_count, stream);
      break;
    case DType::kBF16:
      RunCentre<__nv_bfloat16>(work, token_count, stream);
      break;
  }
  return cudaGetLastError();
}

cudaError_t LaunchEncodePages(const EncodeWork& work, const RotationWeights& weights,
                              const HeadIndex& heads, cudaStream_t stream) {
  return RunPages(work, weights, heads, /*radii=*/nullptr, /*value_centres=*/nullptr, stream);
}

cudaError_t LaunchTensorAppend(const TensorAppend& append, cudaStream_t stream) {
  constexpr int kWarps = kStepAppendWarps;
  const int64_t heads = append.kv_head_count + append.step.query_head_count;
  const int64_t tasks = heads * append.item_count * append.step.token_count;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((tasks + kWarps - 1) / kWarps, 512));
  return Launch<TensorAppendKernel>({{blocks}, kWarps * 32}, stream, append);
}

cudaError_t LaunchStepEncode(const StepEncode* encodes, int item_count, const EncodeWork& shape,
                             const RotationWeights& weights, bool overlap, cudaStream_t stream) {
  if (const cudaError_t error = PreferShared(StepEncodeKernel); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(shape.kv_head_count), static_cast<unsigned>(item_count));
  const auto shared = static_cast<size_t>(EncodePageSharedBytes(shape.head_dim));
  return Launch<StepEncodeKernel>(
      {grid, kPageThreads, shared, overlap}, stream, encodes, weights,
      PageCoding::Of(shape.tiling, shape.head_dim, weights.bits_per_dim));
}

cudaError_t LaunchStepLengths(const StepLength* lengths, int item_count, const StepCheck& check,
                              cudaStream_t stream) {
  return Launch<StepLengthsKernel>({{1}, 64}, stream, lengths, item_count, check);
}

cudaError_t LaunchEncodeFirstPages(const EncodeWork& work, const RotationWeights& weights,
                                   const HeadIndex& heads, std::byte* scratch,
                                   int64_t scratch_bytes, cudaStream_t stream) {
  const int64_t heads_at_once = scratch_bytes / FirstPagesScratchBytes(work.head_dim);
  cudaError_t error = cudaSuccess;
  for (int64_t head = 0; head < work.kv_head_count && error == cudaSuccess; head += heads_at_once) {
    EncodeWork part = work;
    part.begin = 0;
    part.end = kCentreTokenCount;
    part.kv_head_count = static_cast<int>(std::min(heads_at_once, work.kv_head_count - head));
    part.row_pages += head * work.row_page_capacity;
    part.code_pages += head * work.code_page_capacity;
    error = RunFirstPages(
        part, weights,
        {heads.statistics + head, heads.value_centres + head * int64_t{work.head_dim}},
        reinterpret_cast<float*>(scratch), stream);
  }
  return error;
}

}  // namespace spillway::cuda
