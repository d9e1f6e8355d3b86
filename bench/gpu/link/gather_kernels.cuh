#pragma once

#include <cuda/ptx>

#include "bench/gpu/link/gather_launch.h"
#include "bench/gpu/link/pattern.h"

// Kernels that move listed rows between pinned host memory and GPU memory.
//
// All kernels process the list in order: at any moment, with any row size, the rows in flight are a
// short stretch of the list. If the list is sorted by address, this stretch spans little address
// space, which decides how fast sparse rows arrive (docs/link.md).
namespace spillway::bench {

// With more than 32 registers per thread, only one block fits on an SM.
inline constexpr int kSmThreads = 1024;
// 16-byte accesses that a thread has in flight.
inline constexpr int kSmUnroll = 8;

// Thread i of n moves the 16-byte vectors i, i + n, ... of the packed rows. So one access of a warp
// is 512 contiguous bytes of a row, or several short rows that are neighbours in the list. With
// rows of 512 bytes, warp w of W moves rows w, w + W, ...
template <bool kToHost>
__global__ void __launch_bounds__(kSmThreads, 1) SmRowsKernel(RowTransfer t) {
  const uint32_t row_log2 = t.row_bytes_log2 - 4;  // in vectors
  const uint32_t row_mask = (1u << row_log2) - 1;
  const uint32_t row_bytes = 1u << t.row_bytes_log2;
  const uint32_t count = t.row_count << row_log2;
  const uint32_t step = gridDim.x * kSmThreads;
  auto* const packed = reinterpret_cast<uint4*>(t.packed);
  const auto row_of = [&](uint32_t i) { return i < count ? __ldg(t.rows + (i >> row_log2)) : 0; };
  const auto hosted = [&](uint32_t i, uint32_t row) {
    return reinterpret_cast<uint4*>(t.span + uint64_t{row} * row_bytes) + (i & row_mask);
  };

  uint32_t first = blockIdx.x * kSmThreads + threadIdx.x;
  uint32_t rows[kSmUnroll];
#pragma unroll
  for (int u = 0; u < kSmUnroll; ++u) rows[u] = row_of(first + u * step);
  for (; first < count; first += kSmUnroll * step) {
    uint4 values[kSmUnroll];
    uint32_t next_rows[kSmUnroll];
#pragma unroll
    for (int u = 0; u < kSmUnroll; ++u) {
      const uint32_t i = first + u * step;
      if (i < count) values[u] = __ldcs(kToHost ? packed + i : hosted(i, rows[u]));
    }
    // While those loads are in flight, load the next part of the list.
#pragma unroll
    for (int u = 0; u < kSmUnroll; ++u) next_rows[u] = row_of(first + (kSmUnroll + u) * step);
#pragma unroll
    for (int u = 0; u < kSmUnroll; ++u) {
      const uint32_t i = first + u * step;
      if (i < count) __stcs(kToHost ? hosted(i, rows[u]) : packed + i, values[u]);
      rows[u] = next_rows[u];
    }
  }
}

// The number in the span of the row that holds byte `at` of the packed rows.
__device__ inline uint32_t RowAt(const RowTransfer& t, uint64_t at) {
  return __ldg(t.rows + (at >> t.row_bytes_log2));
}

// The address in the span of byte `at` of the packed rows, which belongs to this row.
__device__ inline std::byte* SpanAt(const RowTransfer& t, uint32_t row, uint64_t at) {
  const uint64_t within = at & ((uint64_t{1} << t.row_bytes_log2) - 1);
  return t.span + (uint64_t{row} << t.row_bytes_log2) + within;
}

inline constexpr int kBulkWarps = 8;
inline constexpr int kBulkStages = 4;
inline constexpr uint32_t kBulkStageBytes = 4096;
// More than half of an SM's shared memory, so one block per SM.
inline constexpr int kBulkSharedBytes = kBulkWarps * kBulkStages * kBulkStageBytes;

// Each warp moves chunks of kBulkStageBytes of the packed rows through its own ring of stages: bulk
// copies fill a stage, their bytes complete the stage's mbarrier, and bulk copies drain the stage.
// Warp w of W moves chunks w, w + W, ... On the packed side a chunk is contiguous. On the span's
// side it is one piece or, if rows are shorter, one piece per row; the lanes share the pieces.
// Dynamic shared memory: kBulkSharedBytes.
template <bool kToHost>
__global__ void __launch_bounds__(kBulkWarps * 32, 1) BulkRowsKernel(RowTransfer t) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = cuda::ptx;
  extern __shared__ __align__(128) std::byte rings[];
  __shared__ uint64_t barriers[kBulkWarps][kBulkStages];
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  std::byte* const ring = rings + warp * kBulkStages * kBulkStageBytes;
  uint64_t* const filled = barriers[warp];
  if (lane == 0) {
    for (int stage = 0; stage < kBulkStages; ++stage) ptx::mbarrier_init(&filled[stage], 1);
    // Bulk copies access the barriers through the async proxy, so fence their initialisation.
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncwarp();

  const uint64_t bytes = uint64_t{t.row_count} << t.row_bytes_log2;
  const uint32_t chunk_count =
      static_cast<uint32_t>((bytes + kBulkStageBytes - 1) / kBulkStageBytes);
  const uint32_t first = blockIdx.x * kBulkWarps + warp;
  const uint32_t step = gridDim.x * kBulkWarps;
  const uint32_t own_count = first < chunk_count ? (chunk_count - first + step - 1) / step : 0;
  const uint32_t row_bytes = uint32_t{1} << t.row_bytes_log2;
  const uint32_t piece_bytes = min(row_bytes, kBulkStageBytes);

  // For the warp's i-th chunk: its offset in the packed rows, its bytes, and its stage.
  const auto chunk_at = [&](uint32_t i) { return (first + uint64_t{i} * step) * kBulkStageBytes; };
  const auto chunk_bytes = [&](uint32_t i) {
    return static_cast<uint32_t>(min(bytes - chunk_at(i), uint64_t{kBulkStageBytes}));
  };
  const auto span_at = [&](uint64_t at) { return SpanAt(t, RowAt(t, at), at); };
  const auto stage_of = [&](uint32_t i) { return ring + i % kBulkStages * kBulkStageBytes; };

  const auto fill = [&](uint32_t i) {
    uint64_t* const barrier = &filled[i % kBulkStages];
    const uint64_t at = chunk_at(i);
    const uint32_t size = chunk_bytes(i);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                     size);
    }
    // The barrier must expect the bytes before any of them arrives.
    __syncwarp();
    if constexpr (kToHost) {
      if (lane == 0) {
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, stage_of(i), t.packed + at, size,
                           barrier);
      }
    } else {
      for (uint32_t piece = lane * piece_bytes; piece < size; piece += 32 * piece_bytes) {
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, stage_of(i) + piece,
                           span_at(at + piece), piece_bytes, barrier);
      }
    }
  };
  const auto drain = [&](uint32_t i) {
    const uint64_t at = chunk_at(i);
    const uint32_t size = chunk_bytes(i);
    while (!ptx::mbarrier_try_wait_parity(&filled[i % kBulkStages], i / kBulkStages % 2)) {
    }
    if constexpr (kToHost) {
      for (uint32_t piece = lane * piece_bytes; piece < size; piece += 32 * piece_bytes) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, span_at(at + piece),
                           stage_of(i) + piece, piece_bytes);
      }
    } else if (lane == 0) {
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, t.packed + at, stage_of(i), size);
    }
    // Lanes that drain nothing also commit, because groups are counted per lane.
    ptx::cp_async_bulk_commit_group();
  };

  for (uint32_t i = 0; i < min(own_count, uint32_t{kBulkStages}); ++i) fill(i);
  for (uint32_t i = 0; i < own_count; ++i) {
    drain(i);
    // The copies out of the previous stage had one iteration to finish. Fill that stage again when
    // no lane's copies read it any more.
    if (i > 0 && i - 1 + kBulkStages < own_count) {
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      __syncwarp();
      fill(i - 1 + kBulkStages);
    }
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
#endif
}

// What the pattern gives for word i of the packed rows.
__device__ inline uint64_t ExpectedWord(const RowTransfer& t, uint64_t i) {
  const uint64_t at = i * sizeof(uint64_t);
  return PatternWord(static_cast<uint64_t>(SpanAt(t, RowAt(t, at), at) - t.span) /
                     sizeof(uint64_t));
}

__global__ void FillPatternKernel(RowTransfer t) {
  const uint64_t count = (uint64_t{t.row_count} << t.row_bytes_log2) / sizeof(uint64_t);
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  auto* const words = reinterpret_cast<uint64_t*>(t.packed);
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    words[i] = ExpectedWord(t, i);
  }
}

__global__ void CheckPatternKernel(RowTransfer t, PatternCheck* check) {
  const uint64_t count = (uint64_t{t.row_count} << t.row_bytes_log2) / sizeof(uint64_t);
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  const auto* const words = reinterpret_cast<const uint64_t*>(t.packed);
  unsigned long long wrong = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    wrong += words[i] != ExpectedWord(t, i);
  }
  if (wrong != 0) atomicAdd(&check->wrong_word_count, wrong);
}

__global__ void HoldKernel(uint64_t nanoseconds) {
  const auto now = [] {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  };
  for (const uint64_t start = now(); now() - start < nanoseconds;) {
  }
}

}  // namespace spillway::bench
