#pragma once

#include "gpu/kernels/filter.cuh"

// The list of a phase's rows.
namespace spillway::cuda {

inline constexpr int kPlaceThreads = 256;

// Writes the list, and the gather's list in token order. A warp a chunk; grid
// (blocks, units).
__global__ void __launch_bounds__(kPlaceThreads)
    PlaceKernel(int phase, int64_t row_bytes, const UnitRequest* units) {
  __shared__ SampleRule rule;
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  if (phase == 1 && !state.drawing) return;
  LoadRule(u, state.threshold, rule);
  const int lane = threadIdx.x % 32;
  const bool staged = state.staged[phase];
  const auto put = [&](uint32_t token, int64_t place, int64_t turn) {
    u.list[place] = token;
    if (staged) u.gather[turn] = {RowAddress(u.row_pages, row_bytes, token), place};
  };
  if (phase == 0 && blockIdx.x == 0) {
    const int64_t window_at = state.exact_count - u.window;
    const int64_t window_turn = state.gather_count - u.window;
    for (int64_t i = threadIdx.x; i < u.sink; i += blockDim.x) {
      put(static_cast<uint32_t>(i), i, i);
    }
    for (int64_t i = threadIdx.x; i < u.window; i += blockDim.x) {
      put(static_cast<uint32_t>(u.n - u.window + i), window_at + i, window_turn + i);
    }
  }
  const int64_t first_turn = phase == 0 ? u.sink : 0;
  const int warps = blockDim.x / 32;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
       chunk < u.chunks(); chunk += static_cast<int64_t>(gridDim.x) * warps) {
    const uint32_t count = u.chunk_counts[chunk];
    if (count == 0) continue;
    const uint32_t* before = u.chunk_table + chunk;
    // Lane c and lane c + 32 count the class's tokens so far.
    uint32_t place_low = lane < 1 + rule.strata ? before[lane * u.chunks()] : 0;
    uint32_t place_high = lane + 32 < 1 + rule.strata ? before[(lane + 32) * u.chunks()] : 0;
    int64_t turn = first_turn + WarpSum<int64_t>(int64_t{place_low} + place_high);
    for (uint32_t i = 0; i < count; i += 32) {
      const bool have = i + lane < count;
      const uint32_t token = have ? u.candidates[chunk * kChunkTokens + i + lane] : 0;
      const int kind = have ? Classify(rule, u.bins[token], token) : -1;
      const bool kept = kind >= 0 && !(phase == 1 && kind == 0);
      const unsigned all = __ballot_sync(kFullWarp, kept);
      const unsigned same = __match_any_sync(kFullWarp, kept ? kind : -1);
      const unsigned lower = (1u << lane) - 1;
      const uint32_t low = __shfl_sync(kFullWarp, place_low, kept ? kind % 32 : 0);
      const uint32_t high = __shfl_sync(kFullWarp, place_high, kept ? kind % 32 : 0);
      if (kept) {
        const int64_t base = kind == 0 ? u.sink : state.stratum_first[kind - 1];
        put(token, base + (kind < 32 ? low : high) + __popc(same & lower),
            turn + __popc(all & lower));
      }
      // The counters' lanes learn of their classes' tokens.
      for (unsigned left = all; left != 0;) {
        const int leader = __ffs(left) - 1;
        const int leader_kind = __shfl_sync(kFullWarp, kind, leader);
        const unsigned members = __shfl_sync(kFullWarp, same, leader);
        if (lane == leader_kind % 32) {
          (leader_kind < 32 ? place_low : place_high) += __popc(members);
        }
        left &= ~members;
      }
      turn += __popc(all);
    }
  }
}

}  // namespace spillway::cuda
