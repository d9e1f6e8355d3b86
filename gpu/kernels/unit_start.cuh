#pragma once

#include "gpu/kernels/device_math.cuh"

// What a wave's first kernel does for every selector.
namespace spillway::cuda {

// What every selector's units start from; shared by the grid's x.
__device__ inline void ClearUnit(const AttendShape& shape, const UnitRequest& u) {
  UnitState& state = *u.state;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = thread; i < shape.bin_count; i += threads) u.histogram[i] = 0;
  if (u.by_mass) {
    for (int64_t i = thread; i < shape.group * kScoreBinCount; i += threads) {
      u.head_histograms[i] = 0;
    }
    for (int64_t i = thread; i < (shape.group + 1) * u.segments(); i += threads) {
      u.head_ties[i] = 0;
    }
  }
  if (thread == 0) {
    state.error_token = kNoToken;
    state.heavy_count = 0;
    state.heads_totalled = 0;
    state.heads_done = 0;
    state.heads_finished = 0;
    state.heads_wanting = 0;
  }
  if (thread < kGroupMax) {
    state.reference[thread] = INT32_MIN;
    state.mass[thread] = 0;
  }
}

// What a wave's first kernel has of its requests.
struct PinnedRequests {
  const UnitRequest* units;  // pinned
  const float* q;            // pinned, [units][G][d]
  UnitRequest* copies;       // device

  static PinnedRequests Of(const Wave& wave) { return {wave.host_units, wave.host_q, wave.units}; }
};

// A wave's first kernel may run beside a step's append, and ends after it.
__device__ inline void EndFirst() { GridDependencyWait(); }

// A unit's request from across the link, for the block and, by the first block
// of the grid's x, for the kernels that follow. Leaves that block's request
// for the caller to synchronise.
__device__ inline void FetchRequest(const PinnedRequests& requests, UnitRequest& u) {
  LoadRequest(requests.units + blockIdx.y, u);
  if (blockIdx.x != 0) return;
  const auto* source = reinterpret_cast<const uint64_t*>(&u);
  auto* target = reinterpret_cast<uint64_t*>(requests.copies + blockIdx.y);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(UnitRequest) / 8); i += blockDim.x) {
    target[i] = source[i];
  }
}

}  // namespace spillway::cuda
