#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/rows_fetch.h"
#include "host/base/limits.h"

namespace spillway::cuda {
namespace {

// Few blocks, as gathers have: more hold more addresses in flight than are translated
// (docs/link.md).
constexpr unsigned kBlocks = 8;
constexpr int kThreads = 1024;
// Pieces of 16 bytes that a thread has on their way.
constexpr int kAhead = 4;

// Where 16 bytes come from and go to.
struct Piece {
  const uint4* from;
  uint4* to;
};

__device__ Piece PieceAt(const RowsFetch& f, uint32_t index) {
  const auto half = static_cast<uint32_t>(f.row_bytes / 32);
  const uint32_t row = index / (2 * half);
  const uint32_t chunk = index % (2 * half);
  uint32_t head = 0, token = row, slot = 0;
  if (f.slots != nullptr) {
    slot = f.slots[row];
  } else {
    head = row / f.token_count;
    token = row % f.token_count;
    slot = head * f.head_pages * kPageTokenCount + f.first + token;
  }
  const std::byte* from = f.pages[slot / kPageTokenCount] + slot % kPageTokenCount * f.row_bytes;
  std::byte* to = chunk < half ? f.k + head * f.k_head_stride + token * f.k_token_stride
                               : f.v + head * f.v_head_stride + token * f.v_token_stride;
  return {reinterpret_cast<const uint4*>(from) + chunk,
          reinterpret_cast<uint4*>(to) + (chunk < half ? chunk : chunk - half)};
}

// Neighbours take neighbouring pieces, so that a warp reads rows of a page side by side.
__global__ void __launch_bounds__(kThreads) RowsFetchKernel(RowsFetch f) {
  const uint64_t count = f.row_count * static_cast<uint64_t>(f.row_bytes / 16);
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint64_t first = blockIdx.x * blockDim.x + threadIdx.x; first < count;
       first += uint64_t{kAhead} * step) {
    uint4 bytes[kAhead];
    uint4* to[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const uint64_t at = first + n * uint64_t{step};
      to[n] = nullptr;
      if (at >= count) continue;
      const Piece piece = PieceAt(f, static_cast<uint32_t>(at));
      bytes[n] = __ldcs(piece.from);
      to[n] = piece.to;
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (to[n] != nullptr) *to[n] = bytes[n];
    }
  }
}

}  // namespace

cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream) {
  const int64_t pieces = fetch.row_count * (fetch.row_bytes / 16);
  if (pieces == 0) return cudaSuccess;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((pieces + kThreads - 1) / kThreads, kBlocks));
  return Launch<RowsFetchKernel>({{blocks}, kThreads}, stream, fetch);
}

}  // namespace spillway::cuda
