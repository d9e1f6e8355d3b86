#include <algorithm>

#include "gpu/kernels/filter.cuh"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/place.cuh"
#include "gpu/kernels/resolve.cuh"

namespace spillway::cuda {

cudaError_t LaunchSample(const Wave& wave, int phase, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  const int bins = wave.shape.bin_count;
  const auto class_bytes = static_cast<size_t>(ClassBytes(bins));
  const int64_t segments = (wave.token_count_max + kSegmentTokens - 1) / kSegmentTokens;
  // No more blocks than the GPU holds at once, because each block first loads its tables.
  constexpr int64_t kFilterBlocksPerSm = 5;
  const int64_t share = wave.sm_count * kFilterBlocksPerSm / wave.unit_count;
  const auto filter_blocks = static_cast<unsigned>(std::min(segments, std::max<int64_t>(1, share)));
  cudaError_t error =
      Launch<FilterKernel>({{filter_blocks, units}, kFilterThreads, class_bytes, wave.overlap},
                           stream, phase, bins, wave.units);
  if (error != cudaSuccess) return error;
  error = Launch<ResolveKernel>({units, kResolveThreads, class_bytes, wave.overlap}, stream, phase,
                                bins, wave.units);
  if (error != cudaSuccess) return error;
  return Launch<PlaceKernel>({{filter_blocks, units}, kPlaceThreads, 0, wave.overlap}, stream,
                             phase, wave.shape.row_bytes, wave.units);
}

}  // namespace spillway::cuda
