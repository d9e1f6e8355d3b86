#pragma once

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/step.cuh"

// What a wave's first kernel does for every selector.
namespace spillway::cuda {

// Resets a unit's state; the blocks of the grid's x dimension share the work.
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

// The requests and queries of a wave, for its first kernel.
struct PinnedRequests {
  const UnitRequest* units;  // pinned; for a step, their copy in device memory
  const float* q;            // pinned, [units][G][d]; null: step.q
  UnitRequest* copies;       // device; for the kernels that follow
  CallerTensors step;
  // Whether the wave begins with this launch; not if a first selection has run before it.
  bool begins;
  // Whether the launch may overlap with an append.
  bool overlaps;

  static PinnedRequests Of(const Wave& wave) {
    return {wave.host_units, wave.host_q, wave.units,
            wave.step,       !wave.first, PrepareOverlaps(wave)};
  }
};

// Element i of a unit's queries [G][d]. PinnedQuery() may run before the request is loaded.
// QueryOf() comes after that; for a step it reads the caller's tensor, with 0 for elements that are
// not finite.
__device__ inline float PinnedQuery(const PinnedRequests& requests, int width, int i) {
  return requests.q == nullptr ? 0 : requests.q[int64_t{blockIdx.y} * width + i];
}
__device__ inline float QueryOf(const PinnedRequests& requests, const UnitPlace& place, int group,
                                int head_dim, int i, float pinned) {
  if (requests.q != nullptr) return pinned;
  const float x = TensorQuery(requests.step, place, group, head_dim, i);
  return isfinite(x) ? x : 0.0f;
}

// Loads a unit's request, perhaps across the link. The first block of the grid's x dimension also
// copies it to GPU memory, for the kernels that follow; there the caller must pass a barrier before
// it changes `u`.
__device__ inline void FetchRequest(const PinnedRequests& requests, UnitRequest& u) {
  LoadRequest(requests.units + blockIdx.y, u);
  if (requests.begins && !requests.overlaps) NoteMoment(u.result, kScoreBegins);
  if (blockIdx.x != 0) return;
  const auto* source = reinterpret_cast<const uint64_t*>(&u);
  auto* target = reinterpret_cast<uint64_t*>(requests.copies + blockIdx.y);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(UnitRequest) / 8); i += blockDim.x) {
    target[i] = source[i];
  }
}

// A wave's first kernel may overlap with a step's append, but ends after it.
__device__ inline void EndFirst(const PinnedRequests& requests, const UnitRequest& u) {
  GridDependencyWait();
  if (requests.begins && requests.overlaps) NoteMoment(u.result, kScoreBegins);
}

}  // namespace spillway::cuda
