#include <algorithm>

#include "gpu/kernels/gather.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {

cudaError_t LaunchGather(const Wave& wave, int phase, cudaStream_t stream) {
  const auto row_bytes = wave.shape.row_bytes;
  cudaError_t error = cudaSuccess;
  for (int first = 0; first < wave.unit_count && error == cudaSuccess; first += kGatherUnitsMax) {
    const UnitRequest* units = wave.units + first;
    const int count = std::min(kGatherUnitsMax, wave.unit_count - first);
    if (wave.bulk_copies) {
      const int all = std::max(wave.block_shared_bytes - kBulkStaticBytes, kBulkSharedBytes);
      const int shared = wave.gathers_apart ? all : kBulkSharedBytes;
      const LaunchShape shape{wave.gather_blocks, kBulkWarps * 32, static_cast<size_t>(shared),
                              wave.overlap};
      error = Launch<GatherBulkKernel>(shape, stream, static_cast<int>(row_bytes), units, count,
                                       phase, wave.gathers_apart);
    } else {
      const LaunchShape shape{wave.gather_blocks, kGatherThreads, 0, wave.overlap};
      error = Launch<GatherKernel>(shape, stream, row_bytes, units, count, phase);
    }
  }
  return error;
}

cudaError_t LaunchStagePages(const std::byte* const* from, int64_t capacity, int head_count,
                             int64_t page_count, int64_t page_bytes, std::byte* to,
                             cudaStream_t stream) {
  const auto blocks = static_cast<int>(std::min<int64_t>(head_count * page_count, 64));
  StagePagesKernel<<<blocks, kGatherThreads, 0, stream>>>(from, capacity, head_count, page_count,
                                                          page_bytes, to);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
