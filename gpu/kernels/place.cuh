#pragma once

#include "gpu/kernels/filter.cuh"

// The list of a phase's rows, and where each is read.
namespace spillway::cuda {

inline constexpr int kPlaceThreads = 256;

// Writes the list and its sources, and what is to be gathered in token order.
// A warp a segment; grid (blocks, units).
__global__ void __launch_bounds__(kPlaceThreads)
    PlaceKernel(int phase, int64_t row_bytes, const UnitRequest* units) {
  __shared__ SampleRule rule;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  if (phase > 0 && !state.drawing) return;
  LoadRule(u, phase, state.threshold, rule);
  const int lane = threadIdx.x % 32;
  const bool staged = state.staged;
  std::byte* const staging = u.staging + state.gather_first * row_bytes;
  const auto put = [&](uint32_t token, int64_t place, const std::byte* source) {
    u.list[place] = token;
    u.sources[place] = source;
  };
  const auto bring = [&](uint32_t token, int64_t place, int64_t turn) {
    const std::byte* from = RowAddress(u.row_pages, row_bytes, token);
    if (staged) u.gather[turn] = from;
    put(token, place, staged ? staging + turn * row_bytes : from);
  };
  const int64_t missed_sink = MissedSink(u);
  if (phase == 0 && blockIdx.x == 0) {
    const int64_t held_sink = u.sink - missed_sink;
    for (int64_t i = threadIdx.x; i < u.sink; i += blockDim.x) {
      const auto token = static_cast<uint32_t>(i);
      if (i < held_sink) {
        put(token, i, ResidentRow(u.resident, row_bytes, token));
      } else {
        bring(token, i, i - held_sink);
      }
    }
    const int64_t missed_window = MissedWindow(u);
    const int64_t window_at = state.exact_count - u.window;
    const int64_t window_turn = state.gather_count - missed_window;
    for (int64_t i = threadIdx.x; i < u.window; i += blockDim.x) {
      const auto token = static_cast<uint32_t>(u.n - u.window + i);
      if (i < missed_window) {
        bring(token, window_at + i, window_turn + i);
      } else {
        put(token, window_at + i, u.resident.recent + token % kRecentRows * row_bytes);
      }
    }
  }
  const int64_t first_turn = phase == 0 ? missed_sink : 0;
  const int warps = blockDim.x / 32;
  for (int64_t segment = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
       segment < u.segments(); segment += static_cast<int64_t>(gridDim.x) * warps) {
    const uint32_t count = u.segment_counts[segment];
    if (count == 0) continue;
    const uint32_t* before = u.segment_table + segment;
    // Lane c and lane c + 32 count the class's tokens so far.
    uint32_t place_low = lane < 1 + rule.strata ? before[lane * u.segments()] : 0;
    uint32_t place_high = lane + 32 < 1 + rule.strata ? before[(lane + 32) * u.segments()] : 0;
    int64_t turn = first_turn + before[kMissedColumn * u.segments()];
    for (uint32_t i = 0; i < count; i += 32) {
      const bool have = i + lane < count;
      const FilteredToken passed(have ? u.filtered[segment * kSegmentTokens + i + lane] : 0);
      const auto token = static_cast<uint32_t>(segment * kSegmentTokens + passed.slot);
      const int kind = have ? Kind(rule, passed.c, token) : -1;
      const bool kept = kind >= 0 && !(phase > 0 && kind == 0);
      const unsigned all = __ballot_sync(kFullWarp, kept);
      const unsigned missed = __ballot_sync(kFullWarp, kept && !passed.resident);
      const unsigned same = __match_any_sync(kFullWarp, kept ? kind : -1);
      const unsigned lower = (1u << lane) - 1;
      const uint32_t low = __shfl_sync(kFullWarp, place_low, kept ? kind % 32 : 0);
      const uint32_t high = __shfl_sync(kFullWarp, place_high, kept ? kind % 32 : 0);
      if (kept) {
        const int64_t base = kind == 0 ? u.sink : state.stratum_first[kind - 1];
        const int64_t place = base + (kind < 32 ? low : high) + __popc(same & lower);
        if (passed.resident) {
          put(token, place, ResidentRow(u.resident, row_bytes, token));
        } else {
          bring(token, place, turn + __popc(missed & lower));
        }
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
      turn += __popc(missed);
    }
  }
}

}  // namespace spillway::cuda
