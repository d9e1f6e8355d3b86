#include "gpu/kernels/core_selectors.h"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/methods.h"
#include "gpu/kernels/query.cuh"

namespace spillway::cuda {

bool PrepareOverlaps(const Wave& wave) {
  const bool appends = wave.append.row_count > 0 || wave.step.check.header != nullptr;
  return wave.overlap && appends && wave.follows_append && !wave.first;
}

cudaError_t LaunchClearUnits(const Wave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  return Launch<ClearUnitKernel>({{4, units}, 256, 0, PrepareOverlaps(wave)}, stream, wave.shape,
                                 PinnedRequests::Of(wave));
}

cudaError_t LaunchAsymmetricPrepare(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  const auto units = static_cast<unsigned>(wave.unit_count);
  const auto heads = static_cast<unsigned>((shape.group + 3) / 4 * 4);
  return Launch<PrepareAsymmetricKernel>(
      {{heads, units}, shape.tiling.words * 32, 0, PrepareOverlaps(wave)}, stream, shape,
      PinnedRequests::Of(wave));
}

}  // namespace spillway::cuda
