#include <algorithm>

#include "gpu/kernels/filter.cuh"
#include "gpu/kernels/place.cuh"
#include "gpu/kernels/resolve.cuh"

namespace spillway::cuda {

cudaError_t LaunchSample(const Wave& wave, int phase, cudaStream_t stream) {
  const int64_t chunks = (wave.token_count_max + kChunkTokens - 1) / kChunkTokens;
  const int64_t share = (int64_t{wave.sm_count} * 8 + wave.unit_count - 1) / wave.unit_count;
  const auto blocks = static_cast<int>(std::max<int64_t>(1, std::min(share, chunks)));
  FilterKernel<<<dim3(blocks, wave.unit_count), kFilterThreads, 0, stream>>>(phase, wave.units);
  ResolveKernel<<<wave.unit_count, kResolveThreads, 0, stream>>>(phase, wave.units);
  const int64_t warps = kPlaceThreads / 32;
  const auto place_blocks =
      static_cast<int>(std::max<int64_t>(1, std::min(share, (chunks + warps - 1) / warps)));
  PlaceKernel<<<dim3(place_blocks, wave.unit_count), kPlaceThreads, 0, stream>>>(
      phase, wave.shape.row_bytes, wave.units);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
