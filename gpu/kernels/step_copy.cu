#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/step_copy.h"

namespace spillway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kBlocksMax = 128;

template <typename Piece>
__device__ void CopyRow(const std::byte* from, std::byte* to, int bytes) {
  const int count = bytes / static_cast<int>(sizeof(Piece));
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(from)[i];
  }
}

// One warp per row; blockIdx.y is the tensor.
__global__ void __launch_bounds__(kThreads) StepCopyKernel(StepCopy copy) {
  const TensorCopy& tensor = copy.tensors[blockIdx.y];
  const int64_t tokens = copy.token_count;
  const int64_t rows = copy.sequence_count * tokens * tensor.head_count;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t row = warp; row < rows; row += warps) {
    const int64_t head = row % tensor.head_count;
    const int64_t token = row / tensor.head_count % tokens;
    const int64_t sequence = row / tensor.head_count / tokens;
    const std::byte* from = tensor.from + sequence * tensor.from_strides[0] +
                            token * tensor.from_strides[1] + head * tensor.from_strides[2];
    std::byte* to = tensor.to + sequence * tensor.to_strides[0] + token * tensor.to_strides[1] +
                    head * tensor.to_strides[2];
    if (tensor.piece == sizeof(uint4)) {
      CopyRow<uint4>(from, to, tensor.bytes);
    } else if (tensor.piece == sizeof(uint32_t)) {
      CopyRow<uint32_t>(from, to, tensor.bytes);
    } else {
      CopyRow<uint16_t>(from, to, tensor.bytes);
    }
  }
}

// The largest number of bytes that can be moved at a time: all addresses, strides and row sizes are
// multiples of it.
int32_t PieceOf(const TensorCopy& tensor) {
  int64_t together = reinterpret_cast<intptr_t>(tensor.from) |
                     reinterpret_cast<intptr_t>(tensor.to) | tensor.bytes;
  for (const int64_t stride : tensor.from_strides) together |= stride;
  for (const int64_t stride : tensor.to_strides) together |= stride;
  if (together % static_cast<int64_t>(sizeof(uint4)) == 0) return sizeof(uint4);
  return together % static_cast<int64_t>(sizeof(uint32_t)) == 0 ? sizeof(uint32_t)
                                                                : sizeof(uint16_t);
}

}  // namespace

cudaError_t LaunchStepCopy(StepCopy copy, cudaStream_t stream) {
  int64_t rows = 0;
  for (int i = 0; i < copy.tensor_count; ++i) {
    TensorCopy& tensor = copy.tensors[i];
    tensor.piece = PieceOf(tensor);
    rows = std::max(rows, int64_t{copy.sequence_count} * copy.token_count * tensor.head_count);
  }
  if (rows == 0) return cudaSuccess;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((rows + kWarps - 1) / kWarps, kBlocksMax));
  return Launch<StepCopyKernel>({{blocks, static_cast<unsigned>(copy.tensor_count)}, kThreads},
                                stream, copy);
}

}  // namespace spillway::cuda
