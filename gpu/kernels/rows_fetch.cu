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
// Rows that a warp has on their way.
constexpr int kAhead = 4;

// Where a row comes from, and where its K and V go.
struct Move {
  const uint4* from;
  uint4* k;
  uint4* v;
};

__device__ Move MoveOf(const RowsFetch& f, uint32_t row) {
  uint32_t head = 0, token = row, slot = 0;
  if (f.slots != nullptr) {
    slot = f.slots[row];
  } else {
    head = row / f.token_count;
    token = row % f.token_count;
    slot = head * f.head_pages * kPageTokenCount + f.first + token;
  }
  const std::byte* from = f.pages[slot / kPageTokenCount] + slot % kPageTokenCount * f.row_bytes;
  return {reinterpret_cast<const uint4*>(from),
          reinterpret_cast<uint4*>(f.k + head * f.k_head_stride + token * f.k_token_stride),
          reinterpret_cast<uint4*>(f.v + head * f.v_head_stride + token * f.v_token_stride)};
}

// A warp a row, neighbours neighbours.
__global__ void __launch_bounds__(kThreads) RowsFetchKernel(RowsFetch f) {
  const int half = static_cast<int>(f.row_bytes / 32);
  const auto rows = static_cast<uint32_t>(f.row_count);
  const uint32_t warps = gridDim.x * blockDim.x / 32;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  for (uint32_t first = warp; first < rows; first += kAhead * warps) {
    Move moves[kAhead];
#pragma unroll
    for (uint32_t n = 0; n < kAhead; ++n) {
      const uint32_t row = first + n * warps;
      moves[n] = row < rows ? MoveOf(f, row) : Move{};
    }
    for (int chunk = threadIdx.x % 32; chunk < 2 * half; chunk += 32) {
      uint4 bytes[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (moves[n].from != nullptr) bytes[n] = __ldcs(moves[n].from + chunk);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (moves[n].from == nullptr) continue;
        (chunk < half ? moves[n].k + chunk : moves[n].v + chunk - half)[0] = bytes[n];
      }
    }
  }
}

}  // namespace

cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream) {
  if (fetch.row_count == 0) return cudaSuccess;
  constexpr int kWarps = kThreads / 32;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((fetch.row_count + kWarps - 1) / kWarps, kBlocks));
  return Launch<RowsFetchKernel>({{blocks}, kThreads}, stream, fetch);
}

}  // namespace spillway::cuda
