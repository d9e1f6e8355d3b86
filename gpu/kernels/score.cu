#include "gpu/kernels/core_selectors.h"
#include "gpu/kernels/rank_totals.cuh"
#include "gpu/kernels/reference.cuh"
#include "gpu/kernels/score.cuh"
#include "gpu/kernels/score_launch.cuh"

namespace spillway::cuda {
namespace {

constexpr int kReferenceThreads = 128;

size_t PlaneBytes(const Wave& wave, int quartets) {
  return sizeof(uint2) * quartets * wave.shape.tiling.fragments() * 32;
}

template <int kPlanes, int kFragments>
cudaError_t LaunchReferenceOf(const Wave& wave, cudaStream_t stream) {
  const int quartets = (wave.shape.group + 3) / 4;
  const int warps = kReferenceThreads / 32;
  const int blocks =
      BlocksPerUnit(wave, 16, (wave.reference_pages_max * kCodeTilesPerPage + warps - 1) / warps);
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  const int64_t centre_warps = (pages + kCentrePagesPerWarp - 1) / kCentrePagesPerWarp;
  const int centre_blocks = BlocksPerUnit(wave, 8, (centre_warps + warps - 1) / warps);
  const dim3 grid(blocks + centre_blocks, wave.unit_count);
  return Launch<ReferenceKernel<kPlanes, kFragments>>(
      {grid, kReferenceThreads, PlaneBytes(wave, quartets), wave.overlap}, stream, wave.shape,
      blocks, wave.units);
}

template <int kPlanes, int kFragments>
cudaError_t LaunchScoreOf(const Wave& wave, bool again, cudaStream_t stream) {
  const int quartets = (wave.shape.group + 3) / 4;
  const size_t fixed = sizeof(uint32_t) * kScoreBinCount + PlaneBytes(wave, quartets);
  const int bytes = ScoredBytes(wave.shape.tiling);
  const int warps = ScoreWarps(wave, fixed, bytes);
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  const int64_t rows = wave.unit_count * std::max<int64_t>(1, (pages + warps - 1) / warps);
  // If there were more blocks than SMs, some would have to wait until others end.
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wave.sm_count, rows));
  const LaunchShape launched = {
      {blocks}, 32 * warps, ScoreBytes(fixed, warps, bytes), wave.overlap};
  const auto launch = [&]<bool kMass, bool kOneQuartet>() {
    return Launch<ScoreAsymmetricKernel<kPlanes, kFragments, kMass, kOneQuartet>>(
        launched, stream, wave.shape, again, wave.unit_count, wave.units);
  };
  if (wave.shape.by_mass) return launch.template operator()<true, false>();
  if (quartets > 1) return launch.template operator()<false, false>();
  return launch.template operator()<false, true>();
}

// Calls f<planes, fragments>().
template <typename F>
cudaError_t ForShape(const CodeTiling& tiling, F f) {
  const bool one = tiling.fragments() == 1;
  switch (tiling.planes) {
    case 1:
      return one ? f.template operator()<1, 1>() : f.template operator()<1, 2>();
    case 2:
      return one ? f.template operator()<2, 1>() : f.template operator()<2, 2>();
    case 3:
      return one ? f.template operator()<3, 1>() : f.template operator()<3, 2>();
    default:
      return one ? f.template operator()<4, 1>() : f.template operator()<4, 2>();
  }
}

}  // namespace

int ScoreBins(const ModelSpec&) { return kScoreBinCount; }

namespace {

template <bool kCentres>
cudaError_t LaunchReferenceMassOf(const Wave& wave, cudaStream_t stream) {
  const int64_t tokens = wave.reference_pages_max * kPageTokenCount;
  const dim3 grid(BlocksPerUnit(wave, 2, (tokens + 255) / 256), wave.unit_count, wave.shape.group);
  return Launch<ReferenceMassKernel<kCentres>>({grid, 256, 0, wave.overlap}, stream,
                                               wave.shape.group, wave.units);
}

}  // namespace

cudaError_t LaunchReferenceMass(const Wave& wave, cudaStream_t stream) {
  return LaunchReferenceMassOf<false>(wave, stream);
}

cudaError_t LaunchAsymmetricReference(const Wave& wave, cudaStream_t stream) {
  const cudaError_t error = ForShape(wave.shape.tiling, [&]<int kPlanes, int kFragments>() {
    return LaunchReferenceOf<kPlanes, kFragments>(wave, stream);
  });
  return error == cudaSuccess ? LaunchReferenceMassOf<true>(wave, stream) : error;
}

cudaError_t LaunchAsymmetricScore(const Wave& wave, cudaStream_t stream) {
  return ForShape(wave.shape.tiling, [&]<int kPlanes, int kFragments>() {
    cudaError_t error = LaunchScoreOf<kPlanes, kFragments>(wave, /*again=*/false, stream);
    if (error != cudaSuccess) return error;
    error = Launch<RankTotalsKernel>(
        {dim3(wave.shape.group, wave.unit_count), kRankPageChains, 0, wave.overlap}, stream,
        wave.shape, wave.units);
    // With one head, its weight does not change the order of the scores.
    if (error != cudaSuccess || wave.shape.group == 1) return error;
    return LaunchScoreOf<kPlanes, kFragments>(wave, /*again=*/true, stream);
  });
}

cudaError_t LaunchExactReference(const Wave& wave, cudaStream_t stream) {
  return LaunchLogitReference<ExactLogits>(wave, {}, stream);
}

cudaError_t LaunchExactScore(const Wave& wave, cudaStream_t stream) {
  return LaunchLogitScore<ExactLogits>(wave, {}, stream);
}

}  // namespace spillway::cuda
