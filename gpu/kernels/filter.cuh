#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/sample_limit.h"

// Drawing the tail's sample and listing the rows of a phase, in token order. Tokens are drawn by
// the keyed hash of host/core/keyed_hash.h. Phase 0 lists the exact rows (sink, heavy, window) and
// the pilot, later phases what the budgets ask for beyond it.
// This file has the rule of a draw, and the filter for tokens that may be listed.
namespace spillway::cuda {

inline constexpr int kFilterThreads = 256;

// What is drawn of each class: tokens whose place (SamplePlace()) is in [x, y]; nothing if x > y. y
// is inclusive because a threshold of 2^32 does not fit.
struct SampleRule {
  SampleOrder order;
  int strata;
  int tie_class;
  int64_t heavy_from;  // tokens of the heavy bin from here on are heavy
  uint2 ranges[kClassCount];
};

// Fills `rule`; all threads call it. upper: the thresholds below which tokens are drawn. In phase 0
// all tokens of the heavy bin pass.
__device__ inline void LoadRule(const UnitRequest& u, int phase, const uint64_t* upper,
                                SampleRule& rule) {
  const UnitState& state = *u.state;
  const uint2 nothing = make_uint2(1, 0);
  const uint2 all = make_uint2(0, 0xFFFFFFFFu);
  if (threadIdx.x == 0) {
    rule.order = u.order;
    rule.strata = state.strata;
    rule.tie_class = state.tie_class;
    rule.heavy_from = state.heavy_from;
  }
  for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) {
    // Read together, so that the latency is paid once.
    const bool stratum = c < kTailStrataMax;
    const uint64_t high = stratum ? upper[c] : 0;
    const uint64_t low = stratum ? state.drawn_threshold[c] : 0;
    uint2 range = nothing;
    if (c < state.strata && high > low) {
      range = make_uint2(static_cast<uint32_t>(low), static_cast<uint32_t>(high - 1));
    } else if (phase == 0 && (c == kClassTie || c == kClassHeavy)) {
      range = all;
    }
    rule.ranges[c] = range;
  }
  __syncthreads();
  // After phase 0, ties are drawn like the other tokens of their stratum.
  if (phase > 0 && threadIdx.x == 0) {
    rule.ranges[kClassTie] = rule.tie_class < rule.strata ? rule.ranges[rule.tie_class] : nothing;
  }
  __syncthreads();
}

__device__ inline bool Drawn(const SampleRule& rule, int c, uint32_t token) {
  const uint32_t x = SamplePlace(rule.order, token);
  const uint2 range = rule.ranges[c];
  return x >= range.x && x <= range.y;
}

// A token that has passed the filter, in 32 bits.
struct FilteredToken {
  static __device__ uint32_t Pack(int slot, int c, bool resident) {
    return static_cast<uint32_t>(slot) | static_cast<uint32_t>(c) << 12 |
           static_cast<uint32_t>(resident) << 20;
  }
  __device__ explicit FilteredToken(uint32_t packed)
      : slot(packed & 0xFFFu), c(packed >> 12 & 0xFFu), resident((packed >> 20 & 1u) != 0) {}

  uint32_t slot;  // in its segment
  int c;          // class
  bool resident;  // the GPU holds its row
};
static_assert(kSegmentTokens <= 1 << 12 && kClassCount <= 1 << 8);

// The kind of a filtered token, once it is known which ties are heavy: 0 heavy, 1 + h drawn from
// stratum h, -1 neither.
__device__ inline int Kind(const SampleRule& rule, int c, uint32_t token) {
  if (c == kClassHeavy) return 0;
  if (c == kClassTie) {
    if (token >= rule.heavy_from) return 0;
    c = rule.tie_class;
  }
  return c < rule.strata && Drawn(rule, c, token) ? 1 + c : -1;
}

// What a filtering block needs of bins; in shared memory.
struct BinTable {
  uint8_t* class_of_bin;  // indexed by BinIndex()
  int bin_count;
  uint16_t limit_of_class[kClassCount];

  __device__ int ClassOf(int bin) const { return class_of_bin[BinIndex(bin, bin_count)]; }
};

// Fills `table`; all threads call it, the caller synchronises. limits: [kClassCount].
__device__ inline void LoadBins(const UnitRequest& u, int bin_count, uint8_t* class_of_bin,
                                const uint16_t* limits, BinTable& table) {
  for (int i = threadIdx.x; i < ClassBytes(bin_count) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(class_of_bin)[i] = reinterpret_cast<const uint4*>(u.class_of_bin)[i];
  }
  for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) table.limit_of_class[c] = limits[c];
  if (threadIdx.x == 0) {
    table.class_of_bin = class_of_bin;
    table.bin_count = bin_count;
  }
}

// What a thread reads ahead about its tokens of a segment.
template <int kThreads>
struct OwnTokens {
  static constexpr int kCount = kSegmentTokens / kThreads;
  uint2 pairs[kCount / 4];  // of bins, four in each
  uint32_t resident;        // one bit per token: in the sink or the resident sample

  __device__ void Load(const UnitRequest& u, int64_t segment) {
    const int64_t first = segment * kSegmentTokens + static_cast<int>(threadIdx.x) * kCount;
    resident = 0;
    if (first >= u.n) return;
      // Bins are padded to whole segments.
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      pairs[i] = reinterpret_cast<const uint2*>(u.bins + first)[i];
    }
    if (u.resident.pages == nullptr) return;
    const ResidentPage& page = u.resident.pages[first / kPageTokenCount];
    resident = page.mask[first % kPageTokenCount / 32] >> (first % 32) & ((1u << kCount) - 1);
  }
};

// One bit per token from `first` on, set if the token may be listed: if it is in the resident
// sample, or its bin's limit lets it pass. bins: the tokens' bins.
template <int kThreads>
__device__ inline uint32_t FirstLook(const UnitRequest& u, const BinTable& table, uint32_t near_bin,
                                     uint32_t first, const uint16_t* bins,
                                     const OwnTokens<kThreads>& own) {
  static_assert(OwnTokens<kThreads>::kCount <= 16);
  constexpr uint32_t kHigh = 0x80008000u;
  constexpr int kPairs = OwnTokens<kThreads>::kCount / 2;
  const auto pair_at = [&](int p) { return p % 2 == 0 ? own.pairs[p / 2].x : own.pairs[p / 2].y; };
  const auto passes = [&](int bin, int i) {
    const uint32_t limit = table.limit_of_class[table.ClassOf(bin)];
    const uint32_t turned = TokenHash(u.order.key, first + i) - u.order.phase;
    return turned >> kSampleLimitShift < limit;
  };
  uint32_t flags = 0;
  if (u.resident.pages != nullptr) {
    flags = own.resident;  // includes the resident sample
  } else if (u.order.resident != 0) {
    for (int i = 0; i < OwnTokens<kThreads>::kCount; ++i) {
      if (TokenHash(u.order.key, first + i) < u.order.resident) flags |= 1u << i;
    }
  }
  if (near_bin == 0) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (passes(static_cast<int>(pair_at(p) & 0xFFFFu), 2 * p)) flags |= 1u << (2 * p);
      if (passes(static_cast<int>(pair_at(p) >> 16), 2 * p + 1)) flags |= 2u << (2 * p);
    }
    return flags;
  }
  // Compares two bins at a time: bits p and 16 + p are for tokens 2 p and 2 p + 1. Score bins are
  // below 2^15; kNoBin and kHeavyBin may pass here.
  uint32_t near = 0;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    near |= (((pair_at(p) | kHigh) - (near_bin | near_bin << 16)) & kHigh) >> (15 - p);
  }
  for (; near != 0; near &= near - 1) {
    const int bit = __ffs(near) - 1;
    const int i = 2 * (bit % 16) + bit / 16;
    if (passes(bins[i], i)) flags |= 1u << i;
  }
  return flags;
}

// Collects a segment's filtered tokens in token order, including some that will not be listed, and
// counts those to be listed by kind in segment_table. In phase 0, ties are counted separately,
// because it is not yet known which of them are heavy. All threads of the block call it.
template <int kThreads>
__device__ inline void FilterSegment(const UnitRequest& u, const SampleRule& rule,
                                     const BinTable& table, int phase, int64_t segment,
                                     const OwnTokens<kThreads>& own) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kPerThread = OwnTokens<kThreads>::kCount;
  __shared__ uint32_t warp_counts[kWarps];
  __shared__ uint32_t counts[kSegmentColumns];
  __shared__ SegmentTies ties;
  __shared__ uint16_t found[kSegmentTokens];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t segment_begin = segment * kSegmentTokens;
  const int slots = static_cast<int>(min(int64_t{kSegmentTokens}, u.n - segment_begin));
  const uint16_t* bins = u.bins + segment_begin;
  for (int c = threadIdx.x; c < kSegmentColumns; c += kThreads) counts[c] = 0;
  if (threadIdx.x == 0) ties = {0, 0, 0, 0};
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  uint32_t flags = 0;
  if (first < slots) {
    flags = FirstLook(u, table, static_cast<uint32_t>(u.state->near_bin),
                      static_cast<uint32_t>(segment_begin + first), bins + first, own);
    if (slots - first < kPerThread) flags &= (1u << (slots - first)) - 1;
  }
  const uint32_t count = __popc(flags);
  uint32_t before = WarpScan(count);
  if (lane == 31) warp_counts[warp] = before;
  before -= count;
  __syncthreads();
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_counts[w];
    total += warp_counts[w];
  }
  for (; flags != 0; flags &= flags - 1) {
    found[before++] = static_cast<uint16_t>(first + __ffs(flags) - 1);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < total; i += kThreads) {
    const int slot = found[i];
    const auto token = static_cast<uint32_t>(segment_begin + slot);
    const int c = table.ClassOf(bins[slot]);
    const bool resident = IsResident(u.resident, token);
    u.filtered[segment_begin + i] = FilteredToken::Pack(slot, c, resident);
    if (phase == 0 && c == kClassTie) {
      const bool drawn = rule.tie_class < rule.strata && Drawn(rule, rule.tie_class, token);
      atomicAdd(&ties.all, 1u);
      if (drawn) atomicAdd(&ties.drawn, 1u);
      if (!resident) atomicAdd(&ties.all_missed, 1u);
      if (drawn && !resident) atomicAdd(&ties.drawn_missed, 1u);
      continue;
    }
    const int kind = Kind(rule, c, token);
    if (kind < 0 || (phase > 0 && kind == 0)) continue;
    atomicAdd(&counts[kind], 1u);
    if (!resident) atomicAdd(&counts[kMissedColumn], 1u);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kSegmentColumns; c += kThreads) {
    if (c <= rule.strata || c == kMissedColumn) {
      u.segment_table[c * u.segments() + segment] = counts[c];
    }
  }
  if (threadIdx.x == 0) {
    u.segment_counts[segment] = total;
    u.segment_ties[segment] = ties;
  }
  __syncthreads();
}

// Counts a segment's filtered tokens again, by the current rule and with the ties resolved. counts
// [kSegmentColumns]: shared memory of this warp. All lanes call it.
__device__ inline void CountSegment(const UnitRequest& u, const SampleRule& rule, int phase,
                                    int64_t segment, uint32_t* counts) {
  const int lane = threadIdx.x % 32;
  for (int c = lane; c < kSegmentColumns; c += 32) counts[c] = 0;
  __syncwarp();
  const uint32_t count = u.segment_counts[segment];
  for (uint32_t i = lane; i < count; i += 32) {
    const FilteredToken passed(u.filtered[segment * kSegmentTokens + i]);
    const int kind =
        Kind(rule, passed.c, static_cast<uint32_t>(segment * kSegmentTokens + passed.slot));
    if (kind < 0 || (phase > 0 && kind == 0)) continue;
    atomicAdd(&counts[kind], 1u);
    if (!passed.resident) atomicAdd(&counts[kMissedColumn], 1u);
  }
  __syncwarp();
  for (int c = lane; c < kSegmentColumns; c += 32) {
    if (c <= rule.strata || c == kMissedColumn)
      u.segment_table[c * u.segments() + segment] = counts[c];
  }
  __syncwarp();
}

// Grid (blocks, units). Shared memory: ClassBytes().
__global__ void __launch_bounds__(kFilterThreads)
    FilterKernel(int phase, int bin_count, const UnitRequest* units) {
  extern __shared__ __align__(16) uint8_t class_of_bin[];
  __shared__ BinTable table;
  __shared__ SampleRule rule;
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  // Before the wait: the previous kernel does not write bins.
  OwnTokens<kFilterThreads> own, next;
  own.Load(u, blockIdx.x);
  GridDependencyWait();
  TriggerDependents();
  if (phase == 0) NoteMoment(u.result, kPilotBegins);
  if (blockIdx.x >= u.segments() || (phase > 0 && !u.state->drawing)) return;
  LoadBins(u, bin_count, class_of_bin, u.state->limit_of_class, table);
  LoadRule(u, phase, u.state->threshold, rule);
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    next.Load(u, segment + gridDim.x);
    FilterSegment(u, rule, table, phase, segment, own);
    own = next;
  }
}

}  // namespace spillway::cuda
