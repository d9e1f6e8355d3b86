#include "bench/gpu/link/gather_kernels.cuh"

namespace spillway::bench {
namespace {

// Grid of the pattern kernels: large enough to fill the GPU.
constexpr int kPatternThreads = 256;
constexpr int kPatternBlocks = 2048;

template <bool kToHost>
cudaError_t LaunchBulk(const RowTransfer& t, int sm_count, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      BulkRowsKernel<kToHost>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkSharedBytes);
  if (error != cudaSuccess) return error;
  BulkRowsKernel<kToHost><<<sm_count, kBulkWarps * 32, kBulkSharedBytes, stream>>>(t);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchSmRows(const RowTransfer& t, bool to_host, int sm_count, cudaStream_t stream) {
  if (to_host) {
    SmRowsKernel<true><<<sm_count, kSmThreads, 0, stream>>>(t);
  } else {
    SmRowsKernel<false><<<sm_count, kSmThreads, 0, stream>>>(t);
  }
  return cudaGetLastError();
}

cudaError_t LaunchBulkRows(const RowTransfer& t, bool to_host, int sm_count, cudaStream_t stream) {
  return to_host ? LaunchBulk<true>(t, sm_count, stream) : LaunchBulk<false>(t, sm_count, stream);
}

bool BulkRowsAvailable() {
  // If the driver compiles the kernel from PTX for an older architecture, the kernel is empty. So
  // check the architecture of the PTX, not that of the GPU.
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, BulkRowsKernel<false>) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.ptxVersion >= 90;
}

cudaError_t LaunchFillPattern(const RowTransfer& t, cudaStream_t stream) {
  FillPatternKernel<<<kPatternBlocks, kPatternThreads, 0, stream>>>(t);
  return cudaGetLastError();
}

cudaError_t LaunchCheckPattern(const RowTransfer& t, PatternCheck* check, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(check, 0, sizeof(*check), stream);
  if (error != cudaSuccess) return error;
  CheckPatternKernel<<<kPatternBlocks, kPatternThreads, 0, stream>>>(t, check);
  return cudaGetLastError();
}

cudaError_t LaunchHold(int64_t nanoseconds, cudaStream_t stream) {
  HoldKernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(nanoseconds));
  return cudaGetLastError();
}

}  // namespace spillway::bench
