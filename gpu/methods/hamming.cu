#include "gpu/kernels/score_launch.cuh"
#include "gpu/methods/hamming.cuh"
#include "gpu/methods/launchers.h"

namespace spillway::cuda {

int HammingBins(const ModelSpec& spec) { return spec.match_bin_count(); }

cudaError_t LaunchHammingPrepare(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  const MethodShape& methods = *wave.methods.shape;
  const HammingShape hamming{methods.plane_bits, methods.heads_per_code,
                             methods.mlp ? wave.methods.units : nullptr};
  const auto units = static_cast<unsigned>(wave.unit_count);
  const size_t shared = 2 * sizeof(float) * shape.group * shape.head_dim;
  return Launch<PrepareHammingKernel>({{1, units}, 512, shared, PrepareOverlaps(wave)}, stream,
                                      shape, hamming, PinnedRequests::Of(wave));
}

// Numbers of matching bits need no reference.
cudaError_t LaunchHammingReference(const Wave&, cudaStream_t) { return cudaSuccess; }

cudaError_t LaunchHammingScore(const Wave& wave, cudaStream_t stream) {
  const CodeTiling& tiling = wave.shape.tiling;
  const size_t fixed =
      sizeof(uint32_t) * ((wave.shape.bin_count + tiling.fragments() * 32 + 3) / 4 * 4);
  return LaunchScoring<ScoreHammingKernel>(wave, fixed, tiling.words * kPageTokenCount * 4, stream,
                                           wave.methods.shape->heads_per_code);
}

}  // namespace spillway::cuda
