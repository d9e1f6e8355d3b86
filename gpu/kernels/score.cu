#include <algorithm>

#include "gpu/kernels/hamming.cuh"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/logits.cuh"
#include "gpu/kernels/reference.cuh"
#include "gpu/kernels/score.cuh"

namespace spillway::cuda {
namespace {

constexpr int kReferenceThreads = 128;

// Blocks per unit: `per_sm` on every SM shared among the units, no more than
// there is work for.
int BlocksPerUnit(const Wave& wave, int per_sm, int64_t work) {
  const int64_t share = (int64_t{wave.sm_count} * per_sm + wave.unit_count - 1) / wave.unit_count;
  return static_cast<int>(std::max<int64_t>(1, std::min(share, work)));
}

size_t PlaneBytes(const Wave& wave, int tiles) {
  return sizeof(uint2) * tiles * wave.shape.tiling.chunks() * 32;
}

template <int kPlanes, int kChunks>
cudaError_t LaunchReferenceOf(const Wave& wave, cudaStream_t stream) {
  const int tiles = (wave.shape.group + 3) / 4;
  const int warps = kReferenceThreads / 32;
  const int blocks =
      BlocksPerUnit(wave, 16, (wave.reference_pages_max * kGroupsPerPage + warps - 1) / warps);
  const dim3 grid(blocks, wave.unit_count);
  return Launch<ReferenceKernel<kPlanes, kChunks>>(
      {grid, kReferenceThreads, PlaneBytes(wave, tiles), wave.overlap}, stream, wave.shape,
      wave.units);
}

// Warps of a scoring block: as many as its shared memory has room for rings
// of pages for, beside `fixed` bytes.
int ScoreWarps(size_t fixed, int page_bytes) {
  constexpr size_t kBlockBytes = 100 * 1024;
  const size_t ring = static_cast<size_t>(PageRing::kDepth) * page_bytes;
  const size_t room = fixed < kBlockBytes ? (kBlockBytes - fixed) / ring : 0;
  return static_cast<int>(std::clamp<size_t>(room, 1, kScoreThreads / 32));
}

// kKernel(shape, units) over pages of page_bytes each.
template <auto kKernel>
cudaError_t LaunchScoring(const Wave& wave, size_t fixed, int page_bytes, cudaStream_t stream) {
  const int warps = ScoreWarps(fixed, page_bytes);
  const size_t shared = fixed + static_cast<size_t>(warps) * PageRing::kDepth * page_bytes;
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  const dim3 grid(BlocksPerUnit(wave, kScoreBlocks, (pages + warps - 1) / warps), wave.unit_count);
  return Launch<kKernel>({grid, 32 * warps, shared, wave.overlap}, stream, wave.shape, wave.units);
}

template <int kPlanes, int kChunks>
cudaError_t LaunchScoreOf(const Wave& wave, cudaStream_t stream) {
  const int tiles = (wave.shape.group + 3) / 4;
  const size_t fixed = sizeof(uint32_t) * kScoreBinCount + PlaneBytes(wave, tiles);
  const int bytes = wave.shape.tiling.page_bytes();
  if (wave.shape.by_mass) {
    return LaunchScoring<ScoreAsymmetricKernel<kPlanes, kChunks, true, false>>(wave, fixed, bytes,
                                                                               stream);
  }
  if (tiles > 1) {
    return LaunchScoring<ScoreAsymmetricKernel<kPlanes, kChunks, false, false>>(wave, fixed, bytes,
                                                                                stream);
  }
  return LaunchScoring<ScoreAsymmetricKernel<kPlanes, kChunks, false, true>>(wave, fixed, bytes,
                                                                             stream);
}

// Calls f<planes, chunks>().
template <typename F>
cudaError_t ForShape(const CodeTiling& tiling, F f) {
  const bool one = tiling.chunks() == 1;
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

// Calls f<source of logits>() of a selector that scores by them.
template <typename F>
cudaError_t ForSource(const AttendShape& shape, F f) {
  switch (shape.selector) {
    case Selector::kSketch:
    case Selector::kDoubleSparsity:
      return shape.group <= 4 ? f.template operator()<SketchEstimates<4>>()
                              : f.template operator()<SketchEstimates<16>>();
    case Selector::kQuest:
      return f.template operator()<BoundEstimates>();
    default:
      return f.template operator()<ExactLogits>();
  }
}

bool ScoresByLogits(Selector selector) {
  return selector != Selector::kAsymmetric && selector != Selector::kHamming;
}

// Blocks an SM that score by logits.
constexpr int kLogitBlocks = 8;

}  // namespace

cudaError_t LaunchReference(const Wave& wave, cudaStream_t stream) {
  if (wave.shape.selector == Selector::kHamming) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  if (ScoresByLogits(wave.shape.selector)) {
    const dim3 grid(BlocksPerUnit(wave, kLogitBlocks, wave.reference_pages_max), wave.unit_count);
    error = ForSource(wave.shape, [&]<typename Source>() {
      return Launch<LogitReferenceKernel<Source>>(
          {grid, kLogitThreads, Source::Bytes(wave.shape), wave.overlap}, stream, wave.shape,
          wave.units);
    });
  } else {
    error = ForShape(wave.shape.tiling, [&]<int kPlanes, int kChunks>() {
      return LaunchReferenceOf<kPlanes, kChunks>(wave, stream);
    });
  }
  if (error != cudaSuccess) return error;
  const int64_t tokens = wave.reference_pages_max * kPageTokenCount;
  const dim3 grid(BlocksPerUnit(wave, 2, (tokens + 255) / 256), wave.unit_count, wave.shape.group);
  return Launch<ReferenceMassKernel>({grid, 256, 0, wave.overlap}, stream, wave.units);
}

cudaError_t LaunchScore(const Wave& wave, cudaStream_t stream) {
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  if (ScoresByLogits(wave.shape.selector)) {
    const dim3 grid(BlocksPerUnit(wave, kLogitBlocks, pages), wave.unit_count);
    return ForSource(wave.shape, [&]<typename Source>() {
      const size_t bytes = sizeof(uint32_t) * kScoreBinCount + Source::Bytes(wave.shape);
      return Launch<ScoreLogitsKernel<Source>>({grid, kLogitThreads, bytes, wave.overlap}, stream,
                                               wave.shape, wave.units);
    });
  }
  if (wave.shape.selector == Selector::kHamming) {
    const CodeTiling& tiling = wave.shape.tiling;
    const size_t fixed =
        sizeof(uint32_t) * ((wave.shape.bin_count + tiling.chunks() * 32 + 3) / 4 * 4);
    return LaunchScoring<ScoreHammingKernel>(wave, fixed, tiling.words * kPageTokenCount * 4,
                                             stream);
  }
  return ForShape(wave.shape.tiling, [&]<int kPlanes, int kChunks>() {
    return LaunchScoreOf<kPlanes, kChunks>(wave, stream);
  });
}

}  // namespace spillway::cuda
