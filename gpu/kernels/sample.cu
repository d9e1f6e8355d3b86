#include <algorithm>

#include "gpu/kernels/draw.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {
namespace {

// As many as the GPU holds at once, two an SM, in halves; no more than there are segments.
int BlocksOfUnit(const Wave& wave) {
  const int64_t segments = (wave.token_count_max + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t share = 2 * wave.sm_count / wave.unit_count;
  const int64_t most = std::min({int64_t{wave.unit_blocks_max}, segments, share});
  int blocks = 1;
  while (2 * blocks <= most) blocks *= 2;
  return blocks;
}

}  // namespace

cudaError_t LaunchSample(const Wave& wave, int phase, cudaStream_t stream) {
  const int bins = wave.shape.bin_count;
  const auto blocks = static_cast<unsigned>(BlocksOfUnit(wave));
  LaunchShape shape{{blocks, static_cast<unsigned>(wave.unit_count)},
                    kDrawThreads,
                    static_cast<size_t>(ClassBytes(bins)),
                    wave.overlap};
  shape.cluster_blocks = static_cast<int>(blocks);
  return Launch<DrawKernel>(shape, stream, phase, bins, wave.shape.row_bytes, wave.units);
}

int UnitBlocksMax(bool has_clusters) {
  if (!has_clusters) return 1;
  // Whether a GPU has room for more than the portable number depends on which of its
  // multiprocessors work.
  LaunchShape large{kUnitBlocksMax, kDrawThreads};
  large.shared_bytes = static_cast<size_t>(ClassBytes(kScoreBinCount));
  large.cluster_blocks = kUnitBlocksMax;
  return FitsCluster<DrawKernel>(large) ? kUnitBlocksMax : kPortableClusterBlocks;
}

}  // namespace spillway::cuda
