#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/sample_limit.h"

// Drawing the tail's sample and listing the rows of a phase, in token order,
// without a generator: by the keyed hash of host/core/keyed_hash.h. Phase 0
// lists the exact rows (sink, heavy, window) and the pilot, later ones what the
// budgets ask for beyond the pilot.
// Here: the rule, and the tokens that it lets through.
namespace spillway::cuda {

inline constexpr int kDrawThreads = 512;

// What is drawn of each class: tokens whose places lie in [x, y], both
// inclusive, for a threshold of 2^32 does not fit; x > y is nothing.
struct SampleRule {
  SampleOrder order;
  int strata;
  int tie_class;
  int64_t heavy_from;  // tokens of the heavy bin from here on are heavy
  uint2 ranges[kClassCount];
};

// What of each class the draw up to thresholds upper [kTailStrataMax] takes; in phase 0 all of the
// heavy bin's tokens pass. All threads of the block, which have set the rest of the rule.
__device__ inline void LoadRanges(const UnitRequest& u, int phase, const uint64_t* upper,
                                  SampleRule& rule) {
  const UnitState& state = *u.state;
  const uint2 nothing = make_uint2(1, 0);
  const uint2 all = make_uint2(0, 0xFFFFFFFFu);
  for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) {
    // All read together: one way to memory and back.
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
  // After phase 0 ties are drawn as their stratum is.
  if (phase > 0 && threadIdx.x == 0) {
    rule.ranges[kClassTie] = rule.tie_class < rule.strata ? rule.ranges[rule.tie_class] : nothing;
  }
  __syncthreads();
}

// The rule of a phase, as it begins. All threads of the block.
__device__ inline void LoadRule(const UnitRequest& u, int phase, SampleRule& rule) {
  const UnitState& state = *u.state;
  if (threadIdx.x == 0) {
    rule.order = u.order;
    rule.strata = state.strata;
    rule.tie_class = state.tie_class;
    rule.heavy_from = state.heavy_from;
  }
  LoadRanges(u, phase, state.threshold, rule);
}

__device__ inline bool Drawn(const SampleRule& rule, int c, uint32_t token) {
  const uint32_t x = SamplePlace(rule.order, token);
  const uint2 range = rule.ranges[c];
  return x >= range.x && x <= range.y;
}

// A token that the filter lets through: it is or may be listed. In 32 bits.
struct FilteredToken {
  static __device__ uint32_t Pack(int slot, int c, bool resident) {
    return static_cast<uint32_t>(slot) | static_cast<uint32_t>(c) << 16 |
           static_cast<uint32_t>(resident) << 24;
  }
  __device__ explicit FilteredToken(uint32_t packed)
      : slot(packed & 0xFFFFu), c(packed >> 16 & 0xFFu), resident((packed >> 24 & 1u) != 0) {}

  uint32_t slot;  // in its segment
  int c;          // class
  bool resident;  // the GPU holds its row
};
static_assert(kSegmentTokens <= 1 << 16 && kClassCount <= 1 << 8);

// What a filtered token is once it is known which ties are heavy: 0 heavy, 1 + h
// drawn of stratum h, -1 neither.
__device__ inline int Kind(const SampleRule& rule, int c, uint32_t token) {
  if (c == kClassHeavy) return 0;
  if (c == kClassTie) {
    if (token >= rule.heavy_from) return 0;
    c = rule.tie_class;
  }
  return c < rule.strata && Drawn(rule, c, token) ? 1 + c : -1;
}

// What a filtering block knows of bins, in shared memory.
struct BinTable {
  uint8_t* class_of_bin;  // of BinIndex()
  int bin_count;
  uint16_t limit_of_class[kClassCount];

  __device__ int ClassOf(int bin) const { return class_of_bin[BinIndex(bin, bin_count)]; }
};
// Bytes of class_of_bin.
__host__ __device__ inline int ClassBytes(int bin_count) { return (bin_count + 2 + 15) / 16 * 16; }

// limits: [kClassCount]. All threads of the block; the caller synchronises.
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

// What a thread knows of its tokens of a segment before it looks at them.
struct OwnTokens {
  static constexpr int kCount = kSegmentTokens / kDrawThreads;
  uint2 pairs[kCount / 4];  // of bins
  uint32_t resident;        // a bit each; of tokens that exist

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

// A bit for each of the tokens from `first` on that may be listed: the resident sample's,
// and those that their bins' limits let through. bins: of the tokens.
__device__ inline uint32_t FirstLook(const UnitRequest& u, const BinTable& table, uint32_t near_bin,
                                     uint32_t first, const uint16_t* bins, const OwnTokens& own) {
  static_assert(OwnTokens::kCount <= 16);
  constexpr uint32_t kHigh = 0x80008000u;
  constexpr int kPairs = OwnTokens::kCount / 2;
  const auto pair_at = [&](int p) { return p % 2 == 0 ? own.pairs[p / 2].x : own.pairs[p / 2].y; };
  const auto passes = [&](int bin, int i) {
    const uint32_t limit = table.limit_of_class[table.ClassOf(bin)];
    const uint32_t turned = TokenHash(u.order.key, first + i) - u.order.phase;
    return turned >> kSampleLimitShift < limit;
  };
  uint32_t flags = 0;
  if (u.resident.pages != nullptr) {
    flags = own.resident;  // the resident sample among them
  } else if (u.order.resident != 0) {
    for (int i = 0; i < OwnTokens::kCount; ++i) {
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
  // Two bins at a time: bit p is of token 2 p, bit 16 + p of the next. A bin
  // is below 2^15, or says something else and passes.
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

// What a block counts of its tokens, by column. In phase 0 those of the heavy bin (ties) count
// apart until it is known which of them are heavy.
struct DrawCounts {
  uint32_t columns[kSegmentColumns];
  SegmentTies ties;
};

// Collects a segment's filtered tokens in their order, some of them for nothing; counts them into
// `counts`, shared memory of the block. All threads of the block.
__device__ inline void FilterSegment(const UnitRequest& u, const SampleRule& rule,
                                     const BinTable& table, int phase, int near_bin,
                                     int64_t segment, const OwnTokens& own, DrawCounts& counts) {
  constexpr int kWarps = kDrawThreads / 32;
  constexpr int kPerThread = OwnTokens::kCount;
  __shared__ uint32_t warp_counts[kWarps];
  __shared__ SegmentTies ties;
  __shared__ uint16_t found[kSegmentTokens];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t segment_begin = segment * kSegmentTokens;
  const int slots = static_cast<int>(min(int64_t{kSegmentTokens}, u.n - segment_begin));
  const uint16_t* bins = u.bins + segment_begin;
  if (threadIdx.x == 0) ties = {0, 0, 0, 0};
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  uint32_t flags = 0;
  if (first < slots) {
    flags = FirstLook(u, table, static_cast<uint32_t>(near_bin),
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
  for (uint32_t i = threadIdx.x; i < total; i += kDrawThreads) {
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
    atomicAdd(&counts.columns[kind], 1u);
    if (!resident) atomicAdd(&counts.columns[kMissedColumn], 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u.segment_counts[segment] = total;
    u.segment_ties[segment] = ties;
    counts.ties.all += ties.all;
    counts.ties.drawn += ties.drawn;
    counts.ties.all_missed += ties.all_missed;
    counts.ties.drawn_missed += ties.drawn_missed;
  }
  __syncthreads();
}

// Adds a segment's filtered tokens to `counts`, all that is known considered. All lanes of a warp.
__device__ inline void CountSegment(const UnitRequest& u, const SampleRule& rule, int phase,
                                    int64_t segment, DrawCounts& counts) {
  const uint32_t count = u.segment_counts[segment];
  for (uint32_t i = threadIdx.x % 32; i < count; i += 32) {
    const FilteredToken passed(u.filtered[segment * kSegmentTokens + i]);
    const int kind =
        Kind(rule, passed.c, static_cast<uint32_t>(segment * kSegmentTokens + passed.slot));
    if (kind < 0 || (phase > 0 && kind == 0)) continue;
    atomicAdd(&counts.columns[kind], 1u);
    if (!passed.resident) atomicAdd(&counts.columns[kMissedColumn], 1u);
  }
}

}  // namespace spillway::cuda
