#include <cmath>

#include "gpu/kernels/encode.cuh"
#include "gpu/kernels/encode_tile.cuh"
#include "host/cpu/kernels.h"

namespace spillway::cuda {
namespace {

// Up to here a block a key is quicker: a tile would be mostly empty.
constexpr int64_t kFewTokens = 16;

Quantiser MakeQuantiser(int head_dim, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  Quantiser q;
  q.step = QuantiserStep(bits);
  q.scale = std::sqrt(static_cast<float>(head_dim)) / q.step;
  q.low = -half;
  q.high = half - 0.5f;
  q.shift = Quantiser::kIntegerFloats + half;
  q.middle = half - 0.5f;
  return q;
}

int WholeWarps(int threads) { return (threads + 31) / 32 * 32; }

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
  const Quantiser quantiser = MakeQuantiser(work.head_dim, weights.bits_per_dim);
  if (work.end - work.begin <= kFewTokens) {
    const dim3 grid(static_cast<unsigned>(work.end - work.begin), work.kv_head_count);
    EncodeTokenKernel<<<grid, WholeWarps(work.head_dim), 0, stream>>>(work, weights.transposed,
                                                                      quantiser);
    return cudaGetLastError();
  }
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

cudaError_t LaunchRotate(const float* transposed, int head_dim, const float* x, int count, float* y,
                         cudaStream_t stream) {
  if (count <= 0) return cudaSuccess;
  RotateKernel<<<count, WholeWarps(head_dim), 0, stream>>>(transposed, head_dim, x, y);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
