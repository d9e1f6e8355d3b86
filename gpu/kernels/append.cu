#include <algorithm>

#include "gpu/kernels/append.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {

cudaError_t LaunchStepAppend(const StepAppend& append, cudaStream_t stream) {
  if (append.row_count == 0) return cudaSuccess;
  constexpr int kWarps = 4;
  const int copy_blocks = (kCopiesOfRow * append.row_count + kWarps - 1) / kWarps;
  return Launch<StepAppendKernel>({static_cast<unsigned>(copy_blocks + 1), kWarps * 32}, stream,
                                  append);
}

cudaError_t LaunchRowCopies(const RowCopy* copies, int64_t count, int64_t row_bytes,
                            cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + 3) / 4, 64));
  return Launch<RowCopyKernel>({blocks, kThreads}, stream, copies, count, row_bytes);
}

cudaError_t LaunchWholeCopy(const WholeCopy& copy, cudaStream_t stream) {
  const int64_t rows = copy.head_count * (copy.end - copy.begin);
  if (rows == 0) return cudaSuccess;
  constexpr int kWarps = kWholeCopyThreads / 32;
  // Few blocks, as in a gather: more would have more addresses in flight than the link can
  // translate (docs/link.md).
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((rows + kWarps - 1) / kWarps, 8));
  return Launch<WholeCopyKernel>({blocks, kWholeCopyThreads}, stream, copy);
}

cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<int>(std::min<int64_t>((count + 255) / 256, 64));
  TableUpdateKernel<<<blocks, 256, 0, stream>>>(updates, count);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
