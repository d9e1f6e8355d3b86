#pragma once

#include "gpu/kernels/device_math.cuh"

// Drawing the tail's sample and listing the rows of a phase, in token order,
// without a generator: by the keyed hash of host/core/keyed_hash.h. Phase 0
// lists the exact rows (sink, heavy, window) and the pilot, phase 1 what the
// budgets ask for beyond the pilot.
// Here: the rule, and the candidates that it finds.
namespace spillway::cuda {

inline constexpr int kFilterThreads = 256;

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
      before = WarpScan(count);
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

}  // namespace spillway::cuda
