#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/lsh.cuh"

namespace spillway::cuda {

cudaError_t LaunchLshSample(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  const auto units = static_cast<unsigned>(wave.unit_count);
  const int64_t chunks = (wave.token_count_max + kChunkTokens - 1) / kChunkTokens;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(chunks, 65535)), units);
  cudaError_t error = Launch<LshQueryKernel>(
      {{1, units}, kLshThreads, sizeof(float) * shape.head_dim, wave.overlap}, stream, shape,
      wave.units);
  if (error != cudaSuccess) return error;
  const size_t bucket_bytes = sizeof(uint16_t) * shape.group * shape.sections.tables;
  error = Launch<LshCountKernel>({grid, kLshThreads, bucket_bytes, wave.overlap}, stream, shape,
                                 wave.units);
  if (error != cudaSuccess) return error;
  error = Launch<LshResolveKernel>({units, 32, 0, wave.overlap}, stream, wave.units);
  if (error != cudaSuccess) return error;
  return Launch<LshPlaceKernel>({grid, 32, 0, wave.overlap}, stream, shape.row_bytes, wave.units);
}

}  // namespace spillway::cuda
