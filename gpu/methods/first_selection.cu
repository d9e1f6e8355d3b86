#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/methods/first_selection.cuh"
#include "gpu/methods/launchers.h"

namespace spillway::cuda {
namespace {

unsigned SegmentBlocks(const Wave& wave) {
  const int64_t segments = (wave.token_count_max + kSegmentTokens - 1) / kSegmentTokens;
  return static_cast<unsigned>(std::min<int64_t>(segments, 65535));
}

}  // namespace

cudaError_t LaunchFindCandidates(const Wave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  const size_t shared = sizeof(uint32_t) * wave.shape.bin_count;
  cudaError_t error =
      Launch<CandidateThresholdKernel>({units, kCutThreads, shared, wave.overlap}, stream,
                                       wave.shape.bin_count, wave.methods.units, wave.units);
  if (error != cudaSuccess) return error;
  const dim3 grid(SegmentBlocks(wave), units);
  error = Launch<CountCandidateTiesKernel>({grid, 256, 0, wave.overlap}, stream, wave.methods.units,
                                           wave.units);
  if (error != cudaSuccess) return error;
  return Launch<MarkCandidatesKernel>({grid, 32, 0, wave.overlap}, stream, wave.methods.units,
                                      wave.units);
}

cudaError_t LaunchDropOthers(const Wave& wave, cudaStream_t stream) {
  const dim3 grid(SegmentBlocks(wave), wave.unit_count);
  return Launch<DropOthersKernel>({grid, 256, 0, wave.overlap}, stream, wave.shape,
                                  wave.methods.units, wave.units);
}

}  // namespace spillway::cuda
