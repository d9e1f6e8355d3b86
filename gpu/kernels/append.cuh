#pragma once

#include "gpu/kernels/append.h"
#include "gpu/kernels/device_math.cuh"

// Kernels that copy rows to GPU memory and update the tables of page addresses.
namespace spillway::cuda {

// One warp per row; this is warp `warp` of `warps`.
__device__ inline void CopyRows(const RowCopy* copies, int64_t count, int64_t row_bytes,
                                int64_t warp, int64_t warps) {
  for (int64_t i = warp; i < count; i += warps) {
    const RowCopy copy = copies[i];
    for (int j = threadIdx.x % 32; j < row_bytes / 16; j += 32) {
      reinterpret_cast<uint4*>(copy.to)[j] = reinterpret_cast<const uint4*>(copy.from)[j];
    }
  }
}

__device__ inline void UpdateTables(const TableUpdate* updates, int64_t count, int64_t thread,
                                    int64_t threads) {
  for (int64_t i = thread; i < count; i += threads) {
    const TableUpdate update = updates[i];
    *update.slot = update.value;
  }
}

// The last block updates tables, all others copy rows.
__global__ void StepAppendKernel(StepAppend append) {
  TriggerDependents();
  if (append.begins != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *append.begins = GlobalTime();
  }
  const int copy_blocks = static_cast<int>(gridDim.x) - 1;
  const int block = blockIdx.x;
  if (block < copy_blocks) {
    const int warps = blockDim.x / 32;
    CopyRows(append.copies, append.counts->copy_count, append.row_bytes,
             block * warps + threadIdx.x / 32, copy_blocks * warps);
  } else {
    UpdateTables(append.updates, append.counts->update_count, threadIdx.x, blockDim.x);
  }
}

__global__ void RowCopyKernel(const RowCopy* copies, int64_t count, int64_t row_bytes) {
  const int warps = blockDim.x / 32;
  CopyRows(copies, count, row_bytes, int64_t{blockIdx.x} * warps + threadIdx.x / 32,
           int64_t{gridDim.x} * warps);
}

inline constexpr int kWholeCopyThreads = 1024;

// One warp per row; neighbouring warps copy neighbouring rows.
__global__ void __launch_bounds__(kWholeCopyThreads) WholeCopyKernel(WholeCopy c) {
  constexpr int kAhead = 4;  // rows that a warp has in flight
  const int64_t tokens = c.end - c.begin;
  const int64_t rows = c.head_count * tokens;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / 32);
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const auto address = [&](const std::byte* const* pages, int64_t row) {
    return RowAddress(pages + row / tokens * c.capacity, c.row_bytes, c.begin + row % tokens);
  };
  for (int64_t first = warp; first < rows; first += kAhead * warps) {
    const uint4* from[kAhead];
    uint4* to[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int64_t row = first + n * warps;
      from[n] = nullptr;
      if (row >= rows) continue;
      from[n] = reinterpret_cast<const uint4*>(address(c.from, row));
      to[n] = reinterpret_cast<uint4*>(const_cast<std::byte*>(address(c.to, row)));
    }
    for (int64_t j = threadIdx.x % 32; j < c.row_bytes / 16; j += 32) {
      uint4 bytes[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (from[n] != nullptr) bytes[n] = from[n][j];
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (from[n] != nullptr) to[n][j] = bytes[n];
      }
    }
  }
}

__global__ void TableUpdateKernel(const TableUpdate* updates, int64_t count) {
  UpdateTables(updates, count, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
               int64_t{gridDim.x} * blockDim.x);
}

}  // namespace spillway::cuda
