#include <algorithm>

#include "gpu/kernels/append.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {

cudaError_t LaunchStepAppend(const StepAppend& append, cudaStream_t stream) {
  if (append.key_count == 0) return cudaSuccess;
  const int warps = (append.head_dim + 31) / 32;
  const int copy_blocks = (2 * append.key_count + warps - 1) / warps;
  const auto blocks = static_cast<unsigned>(append.key_count + copy_blocks + 1);
  return Launch<StepAppendKernel>({blocks, warps * 32}, stream, append,
                                  Quantiser::Of(append.head_dim, append.bits_per_dim), copy_blocks);
}

cudaError_t LaunchRowCopies(const RowCopy* copies, int64_t count, int64_t row_bytes,
                            cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + 3) / 4, 64));
  return Launch<RowCopyKernel>({blocks, kThreads}, stream, copies, count, row_bytes);
}

cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<int>(std::min<int64_t>((count + 255) / 256, 64));
  TableUpdateKernel<<<blocks, 256, 0, stream>>>(updates, count);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
