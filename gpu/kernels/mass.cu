#include <algorithm>

#include "gpu/kernels/mass.cuh"

namespace spillway::cuda {

cudaError_t LaunchMassSets(const Wave& wave, cudaStream_t stream) {
  if (!wave.shape.by_mass) return cudaSuccess;
  const int group = wave.shape.group;
  const int64_t chunks = (wave.token_count_max + kChunkTokens - 1) / kChunkTokens;
  const int blocks = static_cast<int>(std::min<int64_t>(chunks, 65535));
  CountHeadBinsKernel<<<dim3(std::min(blocks, 64), wave.unit_count, group), 256, 0, stream>>>(
      wave.units);
  HeadThresholdKernel<<<dim3(group, wave.unit_count), 32, 0, stream>>>(wave.units);
  CountHeadTiesKernel<<<dim3(blocks, wave.unit_count), 256, 0, stream>>>(group, wave.units);
  MarkHeavyKernel<<<dim3(blocks, wave.unit_count), 32, 0, stream>>>(group, wave.units);
  return cudaGetLastError();
}

}  // namespace spillway::cuda
