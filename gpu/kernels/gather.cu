#include <algorithm>

#include "gpu/kernels/gather.cuh"

namespace spillway::cuda {

cudaError_t LaunchGather(const Wave& wave, int phase, cudaStream_t stream) {
  if (wave.bulk_copies) {
    const cudaError_t error = cudaFuncSetAttribute(
        GatherBulkKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkSharedBytes);
    if (error != cudaSuccess) return error;
  }
  for (int first = 0; first < wave.unit_count; first += kGatherUnitsMax) {
    const UnitRequest* units = wave.units + first;
    const int count = std::min(kGatherUnitsMax, wave.unit_count - first);
    if (wave.bulk_copies) {
      GatherBulkKernel<<<wave.gather_blocks, kBulkWarps * 32, kBulkSharedBytes, stream>>>(
          phase, static_cast<int>(wave.shape.row_bytes), units, count);
    } else {
      GatherKernel<<<wave.gather_blocks, kGatherThreads, 0, stream>>>(phase, wave.shape.row_bytes,
                                                                      units, count);
    }
  }
  return cudaGetLastError();
}

cudaError_t LaunchStagePages(const std::byte* const* from, int64_t capacity, int head_count,
                             int64_t page_count, int64_t page_bytes, std::byte* to,
                             cudaStream_t stream) {
  const auto blocks = static_cast<int>(std::min<int64_t>(head_count * page_count, 64));
  StagePagesKernel<<<blocks, kGatherThreads, 0, stream>>>(from, capacity, head_count, page_count,
                                                          page_bytes, to);
  return cudaGetLastError();
}

cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<int>(std::min<int64_t>((count + 255) / 256, 64));
  TableUpdateKernel<<<blocks, 256, 0, stream>>>(updates, count);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
