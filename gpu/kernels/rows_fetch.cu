#include <algorithm>

#include "gpu/kernels/int8_rows.cuh"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/rows_fetch.h"
#include "host/base/limits.h"

namespace spillway::cuda {
namespace {

// Few blocks, as in a gather: more blocks have more addresses in flight than can be translated in
// time (docs/link.md).
constexpr unsigned kBlocks = 8;
constexpr int kThreads = 1024;
// Rows that a warp has in flight.
constexpr int kAhead = 4;

// Where a row comes from, and where its K and V go. `from` is null if there is no row.
struct Move {
  const uint4* from;
  uint4* k;
  uint4* v;
};

__device__ Move MoveTo(const FetchTarget& to, const std::byte* from, int64_t head, int64_t token) {
  return {reinterpret_cast<const uint4*>(from),
          reinterpret_cast<uint4*>(to.k + head * to.k_head_stride + token * to.k_token_stride),
          reinterpret_cast<uint4*>(to.v + head * to.v_head_stride + token * to.v_token_stride)};
}

SPILLWAY_HOST_DEVICE uint32_t RowCount(const RowsFetch& f) { return f.row_count; }

__device__ Move MoveOf(const RowsFetch& f, uint32_t row) {
  const uint32_t slot = f.slots[row];
  return MoveTo(f.to, f.pages[slot / kPageTokenCount] + slot % kPageTokenCount * f.to.row_bytes, 0,
                row);
}

// Every piece counts as a whole page; the rows that it does not have are no moves.
SPILLWAY_HOST_DEVICE uint32_t RowCount(const PagesFetch& f) {
  return f.piece_count * kPageTokenCount;
}

__device__ Move MoveOf(const PagesFetch& f, uint32_t row) {
  const PagesFetch::Piece& piece = f.pieces[row / kPageTokenCount];
  const uint32_t at = row % kPageTokenCount;
  if (at >= piece.count) return {};
  return MoveTo(f.to, piece.rows + at * f.to.row_bytes, piece.head, int64_t{piece.token} + at);
}

// One warp per row; neighbouring warps take neighbouring rows. The list stays in the memory of the
// kernel's parameters.
template <typename Fetch>
__global__ void __launch_bounds__(kThreads) RowsFetchKernel(const __grid_constant__ Fetch f) {
  const int half = static_cast<int>(f.to.row_bytes / 32);
  const uint32_t rows = RowCount(f);
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

constexpr int kInt8Warps = 16;

// The same for rows of 8 bits, which are decoded from copies in shared memory.
template <typename Fetch>
__global__ void __launch_bounds__(kInt8Warps * 32)
    Int8RowsFetchKernel(const __grid_constant__ Fetch f) {
  __shared__ __align__(16) std::byte copies[kInt8Warps][kAhead][kInt8RowBytesMax];
  const int lane = threadIdx.x % 32;
  const int d = f.to.format.head_dim;
  const DType dtype = f.to.format.dtype;
  const int chunks = static_cast<int>(f.to.row_bytes / 16);
  const uint32_t rows = RowCount(f);
  const uint32_t warps = gridDim.x * kInt8Warps;
  auto& own = copies[threadIdx.x / 32];
  for (uint32_t first = blockIdx.x * kInt8Warps + threadIdx.x / 32; first < rows;
       first += kAhead * warps) {
    Move moves[kAhead];
#pragma unroll
    for (uint32_t n = 0; n < kAhead; ++n) {
      const uint32_t row = first + n * warps;
      moves[n] = row < rows ? MoveOf(f, row) : Move{};
    }
    for (int chunk = lane; chunk < chunks; chunk += 32) {
      uint4 bytes[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (moves[n].from != nullptr) bytes[n] = __ldcs(moves[n].from + chunk);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (moves[n].from != nullptr) reinterpret_cast<uint4*>(own[n])[chunk] = bytes[n];
      }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (moves[n].from == nullptr) continue;
      auto* const k = reinterpret_cast<std::byte*>(moves[n].k);
      auto* const v = reinterpret_cast<std::byte*>(moves[n].v);
      DecodeInt8Row(
          d, own[n], lane, 32,
          [&](int i, float4 low, float4 high) {
            const bool of_key = i < d / 8;
            StoreEight(dtype, low, high, of_key ? i : i - d / 8, of_key ? k : v);
          },
          [&](int i, float x) { StoreRounded(dtype, x, i < d ? i : i - d, i < d ? k : v); });
    }
    __syncwarp();
  }
}

template <typename Fetch>
cudaError_t LaunchFetch(const Fetch& fetch, cudaStream_t stream) {
  const int64_t rows = RowCount(fetch);
  if (rows == 0) return cudaSuccess;
  const bool decodes = fetch.to.format.type == RowType::kInt8;
  const int warps = decodes ? kInt8Warps : kThreads / 32;
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>((rows + warps - 1) / warps, kBlocks * (kThreads / 32) / warps));
  const LaunchShape shape = {{blocks}, 32 * warps};
  return decodes ? Launch<Int8RowsFetchKernel<Fetch>>(shape, stream, fetch)
                 : Launch<RowsFetchKernel<Fetch>>(shape, stream, fetch);
}

}  // namespace

cudaError_t LaunchRowsFetch(const RowsFetch& fetch, cudaStream_t stream) {
  return LaunchFetch(fetch, stream);
}

cudaError_t LaunchPagesFetch(const PagesFetch& fetch, cudaStream_t stream) {
  return LaunchFetch(fetch, stream);
}

}  // namespace spillway::cuda
