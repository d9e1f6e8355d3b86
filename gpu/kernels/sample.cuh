#pragma once

#include "gpu/kernels/device_math.cuh"

// Drawing the tail's sample and listing the rows of a phase, in token order,
// without a generator: by the keyed hash of host/core/keyed_hash.h. Phase 0
// lists the exact rows (sink, heavy, window) and the pilot, phase 1 what the
// budgets ask for beyond the pilot.
namespace spillway::cuda {

inline constexpr int kFilterThreads = 256;
inline constexpr int kResolveThreads = 1024;
inline constexpr int kPlaceThreads = 256;

// A unit's rule for its tokens, in shared memory. A stratum's hashes are drawn
// in [low, high], both inclusive, for a threshold of 2^32 does not fit; low >
// high is empty.
struct SampleRule {
  uint32_t multiplier, offset, mask;  // the sample's key
  uint32_t phase;
  int heavy_bin;
  int strata;
  int64_t heavy_from;
  const uint8_t* stratum_of_bin;
  uint2 ranges[kTailStrataMax];
};

// All threads of the block; upper: thresholds that bound the draw.
__device__ inline void LoadRule(const UnitRequest& u, const unsigned long long* upper,
                                SampleRule& rule) {
  const UnitState& state = *u.state;
  if (threadIdx.x == 0) {
    rule.multiplier = u.key_multiplier;
    rule.offset = u.key_offset;
    rule.mask = u.key_mask;
    rule.phase = u.phase;
    rule.heavy_bin = state.heavy_bin;
    rule.strata = state.strata;
    rule.heavy_from = state.heavy_from;
    rule.stratum_of_bin = u.stratum_of_bin;
  }
  for (int h = threadIdx.x; h < kTailStrataMax; h += blockDim.x) {
    uint2 range = make_uint2(1, 0);
    if (h < state.strata && upper[h] > state.drawn_threshold[h]) {
      range.x = static_cast<uint32_t>(state.drawn_threshold[h]);
      range.y = static_cast<uint32_t>(upper[h] - 1);
    }
    rule.ranges[h] = range;
  }
  __syncthreads();
}

// Whether a tail token's hash lies in its stratum's range.
__device__ inline bool Drawn(const SampleRule& rule, int h, uint32_t token) {
  const uint32_t x = TokenHash({rule.multiplier, rule.offset, rule.mask}, token) - rule.phase;
  const uint2 range = rule.ranges[h];
  return x >= range.x && x <= range.y;
}

// What a token is by its bin: -1 nothing, 0 heavy, 1 + h drawn from stratum h.
// Of the heavy bin, tokens from heavy_from on are heavy.
__device__ inline int Classify(const SampleRule& rule, int bin, uint32_t token) {
  if (bin == kHeavyBin) return 0;
  if (bin == kNoBin) return -1;
  if (bin > rule.heavy_bin || (bin == rule.heavy_bin && token >= rule.heavy_from)) return 0;
  if (rule.strata == 0) return -1;
  const int h = __ldg(rule.stratum_of_bin + bin);
  return Drawn(rule, h, token) ? 1 + h : -1;
}

// Lists a chunk's candidates in token order: in phase 0 tokens that are or may
// be heavy, in both those drawn; and counts them by class into chunk_table. In
// phase 0 tokens of the heavy bin (ties) count apart, for which of them are
// heavy is not known yet. All threads of the block.
template <int kThreads>
__device__ inline void FilterChunk(const UnitRequest& u, const SampleRule& rule, int phase,
                                   int64_t chunk) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kPerThread = kThreads >= 512 ? 8 : 16;
  constexpr int kRoundTokens = kThreads * kPerThread;
  __shared__ uint32_t warp_counts[2][kWarps];
  __shared__ uint32_t classes[kChunkColumns + 2];  // and ties, drawn ties
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t chunk_begin = chunk * kChunkTokens;
  const int64_t chunk_end = min(chunk_begin + kChunkTokens, u.n);
  uint32_t* out = u.candidates + chunk_begin;
  for (int c = threadIdx.x; c < kChunkColumns + 2; c += kThreads) classes[c] = 0;
  uint32_t written = 0;  // by the whole block, before this round
  int turn = 0;
  for (int64_t round = chunk_begin; round < chunk_end; round += kRoundTokens, turn ^= 1) {
    __syncthreads();
    const int64_t first = round + static_cast<int64_t>(threadIdx.x) * kPerThread;
    uint32_t flags = 0;
    if (first < chunk_end) {
      // Bins are padded to whole loads.
      uint32_t pairs[kPerThread / 2];
#pragma unroll
      for (int i = 0; i < kPerThread / 8; ++i) {
        reinterpret_cast<uint4*>(pairs)[i] = reinterpret_cast<const uint4*>(u.bins + first)[i];
      }
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int bin = (pairs[i / 2] >> (16 * (i % 2))) & 0xFFFFu;
        const auto token = static_cast<uint32_t>(first + i);
        if (first + i >= chunk_end) continue;
        int kind = -1;
        if (bin == rule.heavy_bin && phase == 0) {
          flags |= 1u << i;
          atomicAdd(&classes[kChunkColumns], 1u);
          if (rule.strata > 0 && Drawn(rule, __ldg(rule.stratum_of_bin + bin), token)) {
            atomicAdd(&classes[kChunkColumns + 1], 1u);
          }
        } else {
          kind = Classify(rule, bin, token);
          if (kind > 0 || (kind == 0 && phase == 0)) {
            flags |= 1u << i;
            atomicAdd(&classes[kind], 1u);
          }
        }
      }
    }
    const uint32_t count = __popc(flags);
    uint32_t before = 0;
    const unsigned found = __ballot_sync(kFullWarp, count > 0);
    uint32_t total_of_warp = 0;
    if (found != 0) {
      before = count;
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(kFullWarp, before, offset);
        if (lane >= offset) before += other;
      }
      total_of_warp = __shfl_sync(kFullWarp, before, 31);
      before -= count;
    }
    if (lane == 0) warp_counts[turn][warp] = total_of_warp;
    __syncthreads();
    uint32_t total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_counts[turn][w];
      total += warp_counts[turn][w];
    }
    uint32_t at = written + before;
    while (flags != 0) {
      const int i = __ffs(flags) - 1;
      flags &= flags - 1;
      out[at++] = static_cast<uint32_t>(first + i);
    }
    written += total;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 1 + rule.strata; c += kThreads) {
    u.chunk_table[c * u.chunks() + chunk] = classes[c];
  }
  if (threadIdx.x == 0) {
    u.chunk_counts[chunk] = written;
    u.chunk_ties[2 * chunk] = classes[kChunkColumns];
    u.chunk_ties[2 * chunk + 1] = classes[kChunkColumns + 1];
  }
  __syncthreads();
}

// Grid (blocks, units).
__global__ void __launch_bounds__(kFilterThreads)
    FilterKernel(int phase, const UnitRequest* units) {
  __shared__ SampleRule rule;
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  if (blockIdx.x >= u.chunks() || (phase == 1 && !u.state->drawing)) return;
  LoadRule(u, u.state->threshold, rule);
  for (int64_t chunk = blockIdx.x; chunk < u.chunks(); chunk += gridDim.x) {
    FilterChunk<kFilterThreads>(u, rule, phase, chunk);
  }
}

// Where the heavy bin's tokens turn heavy: all but the first heavy_skip are.
struct TieSplit {
  int64_t heavy_from;  // token
  int64_t chunk;       // that holds it
  uint32_t heavy;      // of that chunk's ties, the heavy ones
  uint32_t drawn;      // of the others, those drawn
};

// All threads of the block.
__device__ inline void SplitTies(const UnitRequest& u, const SampleRule& rule, int64_t skip,
                                 TieSplit& split) {
  __shared__ int64_t warp_ties[kResolveThreads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    // Until the chunk is found: all of the bin is heavy, or none.
    split = {skip == 0 ? 0 : u.n, skip == 0 ? -1 : u.chunks(), 0, 0};
  }
  if (skip == 0) {
    __syncthreads();
    return;
  }
  int64_t before = 0;  // ties of earlier rounds
  for (int64_t base = 0; base < u.chunks(); base += kResolveThreads) {
    const int64_t chunk = base + threadIdx.x;
    const int64_t ties = chunk < u.chunks() ? u.chunk_ties[2 * chunk] : 0;
    int64_t scan = ties;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t other = __shfl_up_sync(kFullWarp, scan, offset);
      if (lane >= offset) scan += other;
    }
    if (lane == 31) warp_ties[warp] = scan;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < kResolveThreads / 32; ++w) {
      if (w == warp) scan += before + total;
      total += warp_ties[w];
    }
    before += total;
    // The chunk in which the first `skip` end: its warp looks closer.
    const unsigned found = __ballot_sync(kFullWarp, scan > skip && scan - ties <= skip);
    if (found != 0) {
      const int holder = __ffs(found) - 1;
      const int64_t first = __shfl_sync(kFullWarp, scan - ties, holder);
      const int64_t last = __shfl_sync(kFullWarp, scan, holder);
      const int64_t its_chunk = __shfl_sync(kFullWarp, chunk, holder);
      const uint32_t* candidates = u.candidates + its_chunk * kChunkTokens;
      const uint32_t count = u.chunk_counts[its_chunk];
      int64_t rank = first;
      uint32_t drawn = 0;
      for (uint32_t i = 0; i < count; i += 32) {
        const uint32_t token = i + lane < count ? candidates[i + lane] : 0;
        const bool tie = i + lane < count && u.bins[token] == rule.heavy_bin;
        const unsigned mask = __ballot_sync(kFullWarp, tie);
        const int64_t mine = rank + __popc(mask & ((1u << lane) - 1));
        const bool hit = tie && mine < skip && rule.strata > 0 &&
                         Drawn(rule, __ldg(rule.stratum_of_bin + rule.heavy_bin), token);
        drawn += __popc(__ballot_sync(kFullWarp, hit));
        const unsigned turning = __ballot_sync(kFullWarp, tie && mine == skip);
        if (turning != 0) {
          const uint32_t from = __shfl_sync(kFullWarp, token, __ffs(turning) - 1);
          if (lane == 0) split = {from, its_chunk, static_cast<uint32_t>(last - skip), drawn};
          break;
        }
        rank += __popc(mask);
      }
    }
    __syncthreads();
  }
}

// Counts each chunk's candidates by class anew, all that is known considered.
// All threads of the block.
__device__ inline void CountClasses(const UnitRequest& u, const SampleRule& rule, int phase,
                                    uint32_t (*warp_columns)[kChunkColumns]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int columns = 1 + rule.strata;
  uint32_t* mine = warp_columns[warp];
  for (int64_t chunk = warp; chunk < u.chunks(); chunk += kResolveThreads / 32) {
    for (int c = lane; c < columns; c += 32) mine[c] = 0;
    __syncwarp();
    const uint32_t count = u.chunk_counts[chunk];
    for (uint32_t i = lane; i < count; i += 32) {
      const uint32_t token = u.candidates[chunk * kChunkTokens + i];
      const int kind = Classify(rule, u.bins[token], token);
      if (kind > 0 || (kind == 0 && phase == 0)) atomicAdd(&mine[kind], 1u);
    }
    __syncwarp();
    for (int c = lane; c < columns; c += 32) u.chunk_table[c * u.chunks() + chunk] = mine[c];
    __syncwarp();
  }
  __syncthreads();
}

// chunk_table's columns become the class's tokens in chunks before; totals all
// of them. counts(column, chunk, count): what a cell counts. A warp a column;
// all threads of the block.
template <typename Counts>
__device__ inline void SumColumns(const UnitRequest& u, int columns, Counts counts,
                                  int64_t* totals) {
  constexpr int kCells = 8;  // that a lane reads at a time
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32; column < columns; column += blockDim.x / 32) {
    uint32_t* cells = u.chunk_table + column * u.chunks();
    int64_t before = 0;
    for (int64_t base = 0; base < u.chunks(); base += 32 * kCells) {
      uint32_t scans[kCells];
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const int64_t chunk = base + i * 32 + lane;
        scans[i] = chunk < u.chunks() ? counts(column, chunk, cells[chunk]) : 0;
      }
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const int64_t chunk = base + i * 32 + lane;
        uint32_t scan = scans[i];
        for (int offset = 1; offset < 32; offset *= 2) {
          const uint32_t other = __shfl_up_sync(kFullWarp, scan, offset);
          if (lane >= offset) scan += other;
        }
        if (chunk < u.chunks()) cells[chunk] = static_cast<uint32_t>(before + scan - scans[i]);
        before += __shfl_sync(kFullWarp, scan, 31);
      }
    }
    if (lane == 0) totals[column] = before;
  }
  __syncthreads();
}

// The part of UnitState that settling a draw turns over, in shared memory.
struct DrawState {
  int strata;
  int limited;
  int64_t rows_left;
  int64_t list_count;
  int64_t count[kTailStrataMax];  // n_h
  int64_t drawn[kTailStrataMax];
  int64_t wanted[kTailStrataMax];  // phase 0: the pilot, phase 1: the budget
  unsigned long long drawn_threshold[kTailStrataMax];
  unsigned long long threshold[kTailStrataMax];
};

// All threads of the block; the caller synchronises.
__device__ inline void LoadDraw(const UnitRequest& u, int phase, DrawState& draw) {
  const UnitState& s = *u.state;
  if (threadIdx.x == 0) {
    draw.strata = s.strata;
    draw.limited = s.limited;
    draw.rows_left = s.rows_left;
    draw.list_count = s.list_count;
  }
  for (int h = threadIdx.x; h < kTailStrataMax; h += blockDim.x) {
    draw.count[h] = s.stratum_count[h];
    draw.drawn[h] = s.drawn[h];
    draw.wanted[h] = phase == 1 ? s.budget[h] : h < s.strata ? PilotCount(u, s, h) : 0;
    draw.drawn_threshold[h] = s.drawn_threshold[h];
    draw.threshold[h] = s.threshold[h];
  }
}

// What a phase's draw comes to after its size is known.
enum class Verdict : int { kTake, kDrawAgain };

// Phase 0, one thread. Thresholds of strata with too few rows are doubled; a
// draw above row_count_max is made anew, smaller, before a row is read.
__device__ inline Verdict JudgePilot(const int64_t* drawn, DrawState& s) {
  if (s.strata == 0 || s.rows_left == 0) return Verdict::kTake;
  if (s.wanted[0] < 0) return Verdict::kTake;  // given up before
  bool wider = false;
  int64_t total = 0;
  for (int h = 0; h < s.strata; ++h) {
    total += drawn[h];
    const int64_t least = min(int64_t{kStratumRowsMin}, s.count[h]);
    if (drawn[h] >= least) continue;
    const unsigned long long twice = max(s.threshold[h], 1ull) * 2;
    s.threshold[h] = min(twice, 1ull << 32);
    wider = true;
  }
  if (wider) return Verdict::kDrawAgain;
  if (total <= s.rows_left) return Verdict::kTake;
  s.limited = 1;
  int64_t largest = 0;
  for (int h = 0; h < s.strata; ++h) {
    s.wanted[h] = max(int64_t{1}, s.wanted[h] * 3 / 4);
    largest = max(largest, s.wanted[h]);
  }
  for (int h = 0; h < s.strata; ++h) {
    s.threshold[h] = largest == 1 ? 0 : SampleThreshold(s.wanted[h], s.count[h]);
  }
  if (largest == 1) s.wanted[0] = -1;
  return Verdict::kDrawAgain;
}

// Phase 1, likewise.
__device__ inline Verdict JudgeSample(const int64_t* drawn, DrawState& s) {
  int64_t total = 0;
  for (int h = 0; h < s.strata; ++h) total += s.drawn[h] + drawn[h];
  if (total <= s.rows_left) return Verdict::kTake;
  s.limited = 1;
  bool smaller = false;
  for (int h = 0; h < s.strata; ++h) {
    const int64_t next = max(s.drawn[h], s.wanted[h] * 15 / 16);
    smaller |= next < s.wanted[h];
    s.wanted[h] = next;
  }
  for (int h = 0; h < s.strata; ++h) {
    const unsigned long long threshold = SampleThreshold(s.wanted[h], s.count[h]);
    s.threshold[h] = smaller ? max(s.drawn_threshold[h], threshold) : s.drawn_threshold[h];
  }
  return Verdict::kDrawAgain;
}

// The list's layout, the segments that folding takes, and what is drawn now,
// for the kernels that follow. All threads.
__device__ inline void LayOut(const UnitRequest& u, int phase, const int64_t* totals,
                              const DrawState& draw) {
  __shared__ int64_t first_of[1 + kTailStrataMax];
  __shared__ int first_segment[2 + kTailStrataMax];
  __shared__ int64_t segment_rows;
  UnitState& s = *u.state;
  const int sets = 1 + draw.strata;
  const int64_t exact = phase == 0 ? u.sink + totals[0] + u.window : 0;
  if (threadIdx.x == 0) {
    const int64_t begin = draw.list_count;
    int64_t end = begin + exact;
    first_of[0] = begin;
    for (int h = 0; h < draw.strata; ++h) {
      first_of[1 + h] = end;
      end += totals[1 + h];
    }
    if (phase == 0) s.exact_count = exact;
    s.limited = draw.limited;
    s.list_count = end;
    s.gather_count = end - begin;
    s.staged[phase] = end <= u.staging_rows;
    const int64_t even = (end - begin + kSegmentsWanted - 1) / kSegmentsWanted;
    segment_rows = max(int64_t{kSegmentRowsMin}, (even + 31) / 32 * 32);
    const auto rows = static_cast<uint32_t>(segment_rows);
    int segments = 0;
    for (int set = 0; set < sets; ++set) {
      first_segment[set] = segments;
      const auto count = static_cast<uint32_t>(set == 0 ? exact : totals[set]);
      segments += static_cast<int>((count + rows - 1) / rows);
    }
    first_segment[sets] = segments;
    s.segment_count[phase] = segments;
  }
  __syncthreads();
  for (int h = threadIdx.x; h < draw.strata; h += blockDim.x) {
    s.stratum_first[h] = first_of[1 + h];
    s.stratum_drawn[phase][h] = totals[1 + h];
    s.drawn[h] = draw.drawn[h] + totals[1 + h];
    s.threshold[h] = draw.threshold[h];
  }
  for (int set = threadIdx.x / 32; set < sets; set += kResolveThreads / 32) {
    const int64_t rows = set == 0 ? exact : totals[set];
    for (int i = first_segment[set] + threadIdx.x % 32; i < first_segment[set + 1]; i += 32) {
      const int64_t at = (i - first_segment[set]) * segment_rows;
      s.segments[phase][i] = {set, static_cast<int32_t>(min(segment_rows, rows - at)),
                              first_of[set] + at};
    }
  }
}

// Settles a phase's draw. One block a unit.
__global__ void __launch_bounds__(kResolveThreads)
    ResolveKernel(int phase, const UnitRequest* units) {
  __shared__ SampleRule rule;
  __shared__ DrawState draw;
  __shared__ uint32_t warp_columns[kResolveThreads / 32][kChunkColumns];
  __shared__ int64_t totals[kChunkColumns];
  __shared__ unsigned long long collected[kTailStrataMax];
  __shared__ TieSplit split;
  __shared__ Verdict verdict;
  __shared__ bool collect;
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.x, u);
  UnitState& state = *u.state;
  if (phase == 1 && !state.drawing) {
    if (threadIdx.x == 0) {
      state.gather_count = 0;
      state.segment_count[1] = 0;
    }
    return;
  }
  LoadDraw(u, phase, draw);
  LoadRule(u, state.threshold, rule);
  if (threadIdx.x < kTailStrataMax) collected[threadIdx.x] = draw.threshold[threadIdx.x];
  const int columns = 1 + rule.strata;
  if (phase == 0) {
    SplitTies(u, rule, state.heavy_skip, split);
    if (threadIdx.x == 0) state.heavy_from = split.heavy_from;
    const int tie_column =
        rule.strata > 0 && !u.by_mass ? 1 + __ldg(rule.stratum_of_bin + rule.heavy_bin) : -1;
    const auto with_ties = [&](int column, int64_t chunk, uint32_t count) {
      if (column == 0) {
        return count + (chunk > split.chunk    ? u.chunk_ties[2 * chunk]
                        : chunk == split.chunk ? split.heavy
                                               : 0);
      }
      if (column == tie_column) {
        return count + (chunk < split.chunk    ? u.chunk_ties[2 * chunk + 1]
                        : chunk == split.chunk ? split.drawn
                                               : 0);
      }
      return count;
    };
    SumColumns(u, columns, with_ties, totals);
  } else {
    SumColumns(
        u, columns, [](int, int64_t, uint32_t count) { return count; }, totals);
  }
  for (;;) {
    if (threadIdx.x == 0) {
      verdict = phase == 0 ? JudgePilot(totals + 1, draw) : JudgeSample(totals + 1, draw);
      collect = false;
      for (int h = 0; h < draw.strata && verdict == Verdict::kDrawAgain; ++h) {
        if (draw.threshold[h] <= collected[h]) continue;
        collected[h] = draw.threshold[h];
        collect = true;
      }
    }
    __syncthreads();
    if (verdict == Verdict::kTake) break;
    if (collect) {
      // Rare: candidates beyond what was collected.
      LoadRule(u, collected, rule);
      for (int64_t chunk = 0; chunk < u.chunks(); ++chunk) {
        FilterChunk<kResolveThreads>(u, rule, phase, chunk);
      }
    }
    LoadRule(u, draw.threshold, rule);
    CountClasses(u, rule, phase, warp_columns);
    SumColumns(
        u, columns, [](int, int64_t, uint32_t count) { return count; }, totals);
  }
  LayOut(u, phase, totals, draw);
}

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
