#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/mass.cuh"

namespace spillway::cuda {

cudaError_t LaunchMassSets(const Wave& wave, cudaStream_t stream) {
  if (!wave.shape.by_mass) return cudaSuccess;
  const auto units = static_cast<unsigned>(wave.unit_count);
  const auto group = static_cast<unsigned>(wave.shape.group);
  const int64_t segments = (wave.token_count_max + kSegmentTokens - 1) / kSegmentTokens;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(segments, 65535));
  cudaError_t error = Launch<CountHeadBinsKernel>(
      {{std::min(blocks, 64u), units, group}, 256, 0, wave.overlap}, stream, wave.units);
  if (error != cudaSuccess) return error;
  error = Launch<HeadThresholdKernel>({{group + 1, units}, 32, 0, wave.overlap}, stream, wave.shape,
                                      wave.units);
  if (error != cudaSuccess) return error;
  error = Launch<CountHeadTiesKernel>({{blocks, units}, 256, 0, wave.overlap}, stream,
                                      wave.shape.group, wave.units);
  if (error != cudaSuccess) return error;
  return Launch<MarkHeavyKernel>({{blocks, units}, 32, 0, wave.overlap}, stream, wave.shape.group,
                                 wave.units);
}

}  // namespace spillway::cuda
