#pragma once

#include "gpu/kernels/resolve.cuh"

// The list of a phase's rows, and where each is read.
namespace spillway::cuda {

// Writes the list and its sources, and what is to be gathered in token order: a block those of its
// own segments, whose kinds' first rows come after totals.before. All threads of the block.
__device__ inline void PlaceRows(const UnitRequest& u, int phase, int64_t row_bytes,
                                 const UnitBlocks& blocks, const OwnSegments& own,
                                 const SampleRule& rule, const DrawState& draw,
                                 const DrawTotals& totals, const DrawLayout& layout) {
  constexpr int kWarps = kDrawThreads / 32;
  // Of a kind: where its next token goes, and how many each warp has of a round;
  // 0 between rounds.
  __shared__ int64_t next[kKinds];
  __shared__ uint8_t warp_kinds[kWarps][kKinds];
  __shared__ uint32_t warp_missed[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const bool staged = layout.staged;
  std::byte* const staging = u.staging + draw.gathered * row_bytes;
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
  if (phase == 0 && blocks.rank() == 0) {
    const int64_t held_sink = u.sink - missed_sink;
    for (int64_t i = threadIdx.x; i < u.sink; i += blockDim.x) {
      const auto token = static_cast<uint32_t>(i);
      if (i < held_sink) {
        put(token, i, ResidentRow(u.resident, row_bytes, token));
      } else {
        bring(token, i, i - held_sink);
      }
    }
  }
  if (phase == 0 && blocks.rank() == blocks.count() - 1) {
    const int64_t missed_window = MissedWindow(u);
    const int64_t window_at = layout.exact_count - u.window;
    const int64_t window_turn = layout.gather_count - missed_window;
    for (int64_t i = threadIdx.x; i < u.window; i += blockDim.x) {
      const auto token = static_cast<uint32_t>(u.n - u.window + i);
      if (i < missed_window) {
        bring(token, window_at + i, window_turn + i);
      } else {
        put(token, window_at + i, u.resident.recent + token % kRecentRows * row_bytes);
      }
    }
  }
  int64_t turn = (phase == 0 ? missed_sink : 0) + totals.before[kMissedColumn];
  const int kinds = 1 + rule.strata;
  for (int kind = threadIdx.x; kind < kinds; kind += kDrawThreads) {
    // Of the exact rows the sink's come first.
    next[kind] = layout.first[kind] + (kind == 0 ? u.sink : 0) + totals.before[kind];
  }
  for (int i = threadIdx.x; i < kWarps * kKinds; i += kDrawThreads) {
    warp_kinds[i / kKinds][i % kKinds] = 0;
  }
  for (int64_t segment = own.begin; segment < own.end; ++segment) {
    const uint32_t count = u.segment_counts[segment];
    // What a round looks at, read ahead: there is room for a whole segment.
    const uint32_t* filtered = u.filtered + segment * kSegmentTokens;
    uint32_t packed = filtered[threadIdx.x];
    for (uint32_t at = 0; at < count; at += kDrawThreads) {
      const bool have = at + threadIdx.x < count;
      const FilteredToken passed(packed);
      if (at + kDrawThreads < count) packed = filtered[at + kDrawThreads + threadIdx.x];
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
      // By the threads that set next.
      for (int kind = threadIdx.x; kind < kinds; kind += kDrawThreads) {
        for (auto& of_warp : warp_kinds) {
          next[kind] += of_warp[kind];
          of_warp[kind] = 0;
        }
      }
    }
  }
}

}  // namespace spillway::cuda
