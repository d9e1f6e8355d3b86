#include <algorithm>

#include "gpu/kernels/candidates.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {
namespace {

unsigned ChunkBlocks(const Wave& wave) {
  const int64_t chunks = (wave.token_count_max + kChunkTokens - 1) / kChunkTokens;
  return static_cast<unsigned>(std::min<int64_t>(chunks, 65535));
}

}  // namespace

cudaError_t LaunchCandidates(const Wave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  const size_t shared = sizeof(uint32_t) * wave.shape.bin_count;
  cudaError_t error = Launch<CandidateThresholdKernel>({units, kCutThreads, shared, wave.overlap},
                                                       stream, wave.shape, wave.units);
  if (error != cudaSuccess) return error;
  const dim3 grid(ChunkBlocks(wave), units);
  error = Launch<CountCandidateTiesKernel>({grid, 256, 0, wave.overlap}, stream, wave.units);
  if (error != cudaSuccess) return error;
  return Launch<MarkCandidatesKernel>({grid, 32, 0, wave.overlap}, stream, wave.units);
}

cudaError_t LaunchDropOthers(const Wave& wave, cudaStream_t stream) {
  const dim3 grid(ChunkBlocks(wave), wave.unit_count);
  return Launch<DropOthersKernel>({grid, 256, 0, wave.overlap}, stream, wave.shape, wave.units);
}

}  // namespace spillway::cuda
