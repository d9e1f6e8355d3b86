#pragma once

#include "gpu/kernels/device_math.cuh"

// Rows from pinned host memory to the GPU: listed rows in address order, all
// warps side by side in the list, so that the addresses in flight stay close:
// the link is limited by address translation, not by bytes.
namespace spillway::cuda {

inline constexpr int kGatherThreads = 512;

// Units of one gather's lists; more are gathered by further launches.
inline constexpr int kGatherUnitsMax = 256;

// Warps take rows w, w + W, ... of the units' lists, one after the other. Grid
// (blocks); at most kGatherUnitsMax units.
__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(int phase, int64_t row_bytes, const UnitRequest* units, int unit_count) {
  constexpr int kRowsInFlight = 4;
  __shared__ int64_t ends[kGatherUnitsMax];  // rows of the units up to this
  __shared__ const GatherEntry* lists[kGatherUnitsMax];
  __shared__ std::byte* stagings[kGatherUnitsMax];
  for (int i = threadIdx.x; i < unit_count; i += blockDim.x) {
    const UnitState& state = *units[i].state;
    ends[i] = state.staged[phase] ? state.gather_count : 0;
    lists[i] = units[i].gather;
    stagings[i] = units[i].staging;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < unit_count; ++i) ends[i] += ends[i - 1];
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / 32);
  const int loads = static_cast<int>(row_bytes / 16);
  const int64_t count = ends[unit_count - 1];
  int unit = 0;
  for (int64_t i = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32; i < count;
       i += kRowsInFlight * warps) {
    const uint4* from[kRowsInFlight];
    uint4* to[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int64_t at = i + r * warps;
      from[r] = nullptr;
      if (at >= count) continue;
      while (at >= ends[unit]) ++unit;
      const GatherEntry entry = lists[unit][at - (unit > 0 ? ends[unit - 1] : 0)];
      from[r] = reinterpret_cast<const uint4*>(entry.from);
      to[r] = reinterpret_cast<uint4*>(stagings[unit] + entry.place * row_bytes);
    }
    for (int j = lane; j < loads; j += 32) {
      uint4 data[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (from[r] != nullptr) data[r] = from[r][j];
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (from[r] != nullptr) to[r][j] = data[r];
      }
    }
  }
}

// Grid (blocks): a block a page at a time.
__global__ void StagePagesKernel(const std::byte* const* from, int64_t capacity, int head_count,
                                 int64_t page_count, int64_t page_bytes, std::byte* to) {
  constexpr int kInFlight = 4;
  const int64_t loads = page_bytes / 16;
  for (int64_t i = blockIdx.x; i < head_count * page_count; i += gridDim.x) {
    const auto* source =
        reinterpret_cast<const uint4*>(from[i / page_count * capacity + i % page_count]);
    auto* target = reinterpret_cast<uint4*>(to + i * page_bytes);
    for (int64_t base = threadIdx.x; base < loads; base += kInFlight * blockDim.x) {
      uint4 data[kInFlight];
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const int64_t j = base + f * blockDim.x;
        if (j < loads) data[f] = source[j];
      }
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const int64_t j = base + f * blockDim.x;
        if (j < loads) target[j] = data[f];
      }
    }
  }
}

// *slot = value.
__global__ void TableUpdateKernel(const TableUpdate* updates, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const TableUpdate update = updates[i];
    *update.slot = update.value;
  }
}

}  // namespace spillway::cuda
