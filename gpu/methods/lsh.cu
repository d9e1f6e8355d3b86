#include <algorithm>

#include "gpu/kernels/fold_launch.cuh"
#include "gpu/methods/launchers.h"
#include "gpu/methods/lsh.cuh"

namespace spillway::cuda {
namespace {

LshShape ShapeOf(const Wave& wave) {
  const MethodShape& methods = *wave.methods.shape;
  return {methods.sections.tables, methods.lsh_bits,
          methods.section_offset + methods.sections.buckets(), wave.methods.units};
}

}  // namespace

cudaError_t LaunchLshSample(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  const LshShape lsh = ShapeOf(wave);
  const auto units = static_cast<unsigned>(wave.unit_count);
  const int64_t segments = (wave.token_count_max + kSegmentTokens - 1) / kSegmentTokens;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(segments, 65535)), units);
  cudaError_t error = Launch<LshQueryKernel>(
      {{1, units}, kLshThreads, sizeof(float) * shape.head_dim, wave.overlap}, stream, shape, lsh,
      wave.units);
  if (error != cudaSuccess) return error;
  const size_t bucket_bytes = sizeof(uint16_t) * shape.group * lsh.tables;
  error = Launch<LshCountKernel>({grid, kLshThreads, bucket_bytes, wave.overlap}, stream, shape,
                                 lsh, wave.units);
  if (error != cudaSuccess) return error;
  error = Launch<LshResolveKernel>({units, 32, 0, wave.overlap}, stream, wave.units);
  if (error != cudaSuccess) return error;
  return Launch<LshPlaceKernel>({grid, 32, 0, wave.overlap}, stream, shape.row_bytes, lsh.methods,
                                wave.units);
}

cudaError_t LaunchLshFold(const Wave& wave, cudaStream_t stream) {
  return LaunchFoldOf<LshLogits>(wave, 1, ShapeOf(wave), stream);
}

}  // namespace spillway::cuda
