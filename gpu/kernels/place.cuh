#pragma once

#include "gpu/kernels/filter.cuh"
#include "gpu/kernels/shared_rows.cuh"

// The list of a phase's rows, and the address from which each row is read.
namespace spillway::cuda {

inline constexpr int kPlaceThreads = 256;

// Kinds of listed tokens: see Kind().
inline constexpr int kKinds = 1 + kTailStrataMax;

// Writes the list, the sources of its rows, and the rows to gather, in token order. One block per
// segment at a time; grid (blocks, units).
__global__ void __launch_bounds__(kPlaceThreads)
    PlaceKernel(int phase, int64_t row_bytes, const UnitRequest* units) {
  constexpr int kWarps = kPlaceThreads / 32;
  __shared__ SampleRule rule;
  // Per kind: where its next token goes in the list, and its tokens in a round by warp; 0 between
  // rounds.
  __shared__ int64_t next[kKinds];
  __shared__ uint8_t warp_kinds[kWarps][kKinds];
  __shared__ uint32_t warp_missed[kWarps];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  if (phase > 0 && !state.drawing) return;
  LoadRule(u, phase, state.threshold, rule);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const bool staged = state.staged;
  std::byte* const staging = u.staging + state.gather_first * row_bytes;
  const auto put = [&](uint32_t token, int64_t place, const std::byte* source) {
    u.list[place] = token;
    u.sources[place] = source;
  };
  // For a row that the GPU does not hold: the turn-th one of the phase.
  const auto bring = [&](uint32_t token, int64_t place, int64_t turn) {
    const std::byte* from = RowAddress(u.row_pages, row_bytes, token);
    if (!staged) {
      put(token, place, from);
      return;
    }
    std::byte* const own = staging + turn * row_bytes;
    const std::byte* const at = u.shared.slots == 0 ? own : PlaceSharedRow(u.shared, from, own);
    u.gather[turn] = at == own ? from : nullptr;
    if (at != own) atomicAdd(&u.state->shared_count, 1ull);
    put(token, place, at);
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
        put(token, window_at + i, WindowRow(u.resident, row_bytes, token));
      }
    }
  }
  const int64_t first_turn = phase == 0 ? missed_sink : 0;
  const int kinds = 1 + rule.strata;
  for (int i = threadIdx.x; i < kWarps * kKinds; i += kPlaceThreads) {
    warp_kinds[i / kKinds][i % kKinds] = 0;
  }
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    const uint32_t count = u.segment_counts[segment];
    // A round's tokens are loaded one round ahead; there is room for a whole segment.
    const uint32_t* filtered = u.filtered + segment * kSegmentTokens;
    uint32_t packed = filtered[threadIdx.x];
    const uint32_t* before = u.segment_table + segment;
    for (int kind = threadIdx.x; kind < kinds; kind += kPlaceThreads) {
      const int64_t base = kind == 0 ? u.sink : state.stratum_first[kind - 1];
      next[kind] = base + before[kind * u.segments()];
    }
    int64_t turn = first_turn + before[kMissedColumn * u.segments()];
    for (uint32_t at = 0; at < count; at += kPlaceThreads) {
      const bool have = at + threadIdx.x < count;
      const FilteredToken passed(packed);
      if (at + kPlaceThreads < count) packed = filtered[at + kPlaceThreads + threadIdx.x];
      const auto token = static_cast<uint32_t>(segment * kSegmentTokens + passed.slot);
      const int kind = have ? Kind(rule, passed.c, token) : -1;
      const bool kept = kind >= 0 && !(phase > 0 && kind == 0);
      const unsigned missed = __ballot_sync(kFullWarp, kept && !passed.resident);
      const unsigned same = __match_any_sync(kFullWarp, kept ? kind : -1);
      const unsigned lower = (1u << lane) - 1;
      __syncthreads();
      if (kept && (same & lower) == 0) warp_kinds[warp][kind] = static_cast<uint8_t>(__popc(same));
      if (lane == 0) warp_missed[warp] = __popc(missed);
      __syncthreads();
      if (kept) {
        int64_t place = next[kind] + __popc(same & lower);
        int64_t own_turn = turn + __popc(missed & lower);
        for (int w = 0; w < warp; ++w) {
          place += warp_kinds[w][kind];
          own_turn += warp_missed[w];
        }
        if (passed.resident) {
          put(token, place, ResidentRow(u.resident, row_bytes, token));
        } else {
          bring(token, place, own_turn);
        }
      }
      for (const uint32_t of_warp : warp_missed) turn += of_warp;
      __syncthreads();
      // By the same threads that set `next` for the segment.
      for (int kind = threadIdx.x; kind < kinds; kind += kPlaceThreads) {
        for (auto& of_warp : warp_kinds) {
          next[kind] += of_warp[kind];
          of_warp[kind] = 0;
        }
      }
    }
  }
}

}  // namespace spillway::cuda
