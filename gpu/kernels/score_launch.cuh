#pragma once

#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/logits.cuh"
#include "gpu/kernels/methods.h"

// How kernels that score are launched.
namespace spillway::cuda {

// Blocks per unit, at most `work`: all units together get `per_sm` blocks per SM.
inline int BlocksPerUnit(const Wave& wave, int per_sm, int64_t work) {
  const int64_t share = (int64_t{wave.sm_count} * per_sm + wave.unit_count - 1) / wave.unit_count;
  return static_cast<int>(std::max<int64_t>(1, std::min(share, work)));
}

// Warps of a scoring block: as many as have room for their rings of pages in shared memory, besides
// `fixed` bytes. If that is four or more, a multiple of four, so that the four parts of an SM get
// the same number.
inline int ScoreWarps(const Wave& wave, size_t fixed, int page_bytes) {
  constexpr size_t kStaticBytes = 4096;  // upper limit for the scoring kernels
  constexpr size_t kWarpsMax = kScoreThreads / 32;
  const size_t ring = static_cast<size_t>(PageRing::kDepth) * page_bytes;
  const size_t taken = fixed + kStaticBytes;
  const auto block_bytes = static_cast<size_t>(wave.block_shared_bytes);
  const size_t room = taken < block_bytes ? (block_bytes - taken) / ring : 0;
  const size_t warps = std::clamp<size_t>(room, 1, kWarpsMax);
  return static_cast<int>(warps < 4 ? warps : warps / 4 * 4);
}

// The shared memory of a scoring block with so many warps.
inline size_t ScoreBytes(size_t fixed, int warps, int page_bytes) {
  return fixed + static_cast<size_t>(warps) * PageRing::kDepth * page_bytes;
}

// Launches kKernel(shape, more..., units), which scores pages of page_bytes each.
template <auto kKernel, typename... More>
cudaError_t LaunchScoring(const Wave& wave, size_t fixed, int page_bytes, cudaStream_t stream,
                          const More&... more) {
  const int warps = ScoreWarps(wave, fixed, page_bytes);
  const size_t shared = ScoreBytes(fixed, warps, page_bytes);
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  // If there were more blocks than SMs, some would have to wait until others end.
  const int64_t share = std::max(1, wave.sm_count / wave.unit_count);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(share, (pages + warps - 1) / warps)),
                  wave.unit_count);
  return Launch<kKernel>({grid, 32 * warps, shared, wave.overlap}, stream, wave.shape, more...,
                         wave.units);
}

// Blocks per SM of the kernels that score by logits.
inline constexpr int kLogitBlocks = 8;

template <typename Source>
cudaError_t LaunchLogitReference(const Wave& wave, const typename Source::Context& context,
                                 cudaStream_t stream) {
  const dim3 grid(BlocksPerUnit(wave, kLogitBlocks, wave.reference_pages_max), wave.unit_count);
  const cudaError_t error = Launch<LogitReferenceKernel<Source>>(
      {grid, kLogitThreads, Source::Bytes(wave.shape, context), wave.overlap}, stream, wave.shape,
      context, wave.units);
  return error == cudaSuccess ? LaunchReferenceMass(wave, stream) : error;
}

template <typename Source>
cudaError_t LaunchLogitScore(const Wave& wave, const typename Source::Context& context,
                             cudaStream_t stream) {
  const int64_t pages = (wave.token_count_max + kPageTokenCount - 1) / kPageTokenCount;
  const dim3 grid(BlocksPerUnit(wave, kLogitBlocks, pages), wave.unit_count);
  const size_t bytes = sizeof(uint32_t) * kScoreBinCount + Source::Bytes(wave.shape, context);
  return Launch<ScoreLogitsKernel<Source>>({grid, kLogitThreads, bytes, wave.overlap}, stream,
                                           wave.shape, context, wave.units);
}

}  // namespace spillway::cuda
