#include "gpu/kernels/encode.cuh"
#include "gpu/kernels/encode_tile.cuh"

namespace spillway::cuda {
namespace {

template <typename T>
void RunCentre(const EncodeWork& work, int64_t token_count, cudaStream_t stream) {
  // Narrow blocks: few threads in all, best on many SMs.
  constexpr int kThreads = 32;
  const dim3 grid((work.head_dim + kThreads - 1) / kThreads, work.kv_head_count);
  CentreKernel<T><<<grid, kThreads, 0, stream>>>(work, token_count);
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

cudaError_t LaunchEncodeRotation(const EncodeWork& work, const RotationWeights& weights,
                                 cudaStream_t stream) {
  if (work.end <= work.begin) return cudaSuccess;
  const Quantiser quantiser = Quantiser::Of(work.head_dim, weights.bits_per_dim);
  // Every call: the attributes are a device's own, and setting them is cheap.
  const int shared = EncodeTileSharedBytes(work.head_dim);
  cudaError_t error =
      cudaFuncSetAttribute(EncodeTileKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(EncodeTileKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error != cudaSuccess) return error;
  const int64_t tiles = (work.end + kTileTokens - 1) / kTileTokens - work.begin / kTileTokens;
  const dim3 grid(static_cast<unsigned>(tiles), work.kv_head_count);
  EncodeTileKernel<<<grid, kTileThreads, shared, stream>>>(work, weights.transposed, quantiser);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
