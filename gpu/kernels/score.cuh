#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/score.h"

// Scores of codes on binary tensor cores, and their histogram.
//
// A warp takes 32 tokens of a code page at a time, as two pairs of tiles of 8:
// the instruction m16n8k128 .and.popc multiplies a pair's 16 keys with eight
// columns of query bits, (head, plane) pairs of four heads. Two of them hold
// four planes of four heads, so that a lane ends up with all planes of one
// head for two keys of the pair. Memory is to be the limit: everything else is
// counted in instructions per key.
namespace spillway::cuda {

// acc += popcounts of the bits that rows of a and columns of b share. Lane:
// a0 row lane / 4, a1 row lane / 4 + 8, b column lane / 4, each word lane % 4;
// acc[0..1] row lane / 4, columns 2 (lane % 4) + {0, 1}; acc[2..3] row
// lane / 4 + 8.
__device__ inline void AndPopc(int32_t (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The words of a lane's keys, one of each of a group's four tiles, for one
// plane and chunk; 0 where the chunk has no such word.
__device__ inline uint4 LoadCodes(const CodeTiling& tiling, const std::byte* page, int plane,
                                  int group, int chunk, int lane) {
  const int width = tiling.chunk_words(chunk);
  const int word = lane % 4;
  if (word >= width) return make_uint4(0, 0, 0, 0);
  const uint32_t* at = reinterpret_cast<const uint32_t*>(page) +
                       tiling.chunk_offset(plane, group, chunk) + (lane / 4 * width + word) * 4;
  return *reinterpret_cast<const uint4*>(at);
}

// A warp's pages on their way to shared memory: the next one comes while one
// is scored. 16-byte asynchronous copies; `bytes` from `page` on.
class PageRing {
 public:
  static constexpr int kDepth = 2;

  __device__ PageRing(std::byte* memory, int bytes) : memory_(memory), bytes_(bytes) {}
  // Begins to bring a page; null: none, but the turn is taken.
  __device__ void Bring(const std::byte* page, int lane) {
    if (page != nullptr) {
      const auto to =
          static_cast<uint32_t>(__cvta_generic_to_shared(memory_ + (brought_ % kDepth) * bytes_));
      for (int i = lane * 16; i < bytes_; i += 32 * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(page + i));
      }
    }
    asm volatile("cp.async.commit_group;");
    ++brought_;
  }
  // Waits for the oldest page that was not taken yet.
  __device__ const std::byte* Take() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
    __syncwarp();
    return memory_ + (taken_++ % kDepth) * bytes_;
  }

 private:
  std::byte* const memory_;
  const int bytes_;
  int brought_ = 0;
  int taken_ = 0;
};

// Which token of a group of 32 a lane holds once four heads were exchanged.
__device__ inline int TokenOfLane(int lane) { return (lane % 4) * 8 + lane / 4; }

// a[tile] of head `lane % 4` becomes a[head] of tile `lane % 4`.
__device__ inline void ExchangeHeads(float (&a)[4], int lane) {
  const bool odd = (lane & 1) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const float sent = odd ? a[j] : a[j + 1];
    const float received = __shfl_xor_sync(kFullWarp, sent, 1);
    if (odd) {
      a[j] = received;
    } else {
      a[j + 1] = received;
    }
  }
  const bool high = (lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float sent = high ? a[j] : a[j + 2];
    const float received = __shfl_xor_sync(kFullWarp, sent, 2);
    if (high) {
      a[j] = received;
    } else {
      a[j + 2] = received;
    }
  }
}

// Two blocks an SM: their pages in flight fill its shared memory.
inline constexpr int kScoreThreads = 256;
inline constexpr int kScoreBlocks = 2;

// Query bits of a block's unit in shared memory: per head tile and chunk the
// lane's words of both column sets. Column 2 head + plane % 2 of set
// plane / 2 is row plane * 4 + head of query_planes.
__device__ inline void LoadQueryPlanes(const UnitRequest& u, int tiles, int words, int chunks,
                                       uint2* planes) {
  for (int i = threadIdx.x; i < tiles * chunks * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int chunk = i / 32 % chunks;
    const int tile = i / 32 / chunks;
    const int word = chunk * kChunkWords + lane % 4;
    const int head = lane / 4 / 2;
    const int plane = lane / 4 % 2;
    const uint32_t* rows = u.query_planes + tile * 16 * words;
    uint2 pair = make_uint2(0, 0);
    if (word < words) {
      pair.x = rows[(plane * 4 + head) * words + word];
      pair.y = rows[((plane + 2) * 4 + head) * words + word];
    }
    planes[i] = pair;
  }
}

// acc = sum over planes 2^p of AndPopc. Two planes cost one instruction more
// than they need, and none of the other kind.
template <int kPlanes, int kChunks>
__device__ inline void WeightedPopc(const uint4 (&codes)[kPlanes][kChunks], int pair,
                                    const uint32_t (&b)[kChunks], int32_t (&acc)[4]) {
#pragma unroll
  for (int p = kPlanes - 1; p >= 0; --p) {
    if (kPlanes > 2 && p + 1 < kPlanes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] *= 2;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4& k = codes[p][c];
      const uint32_t low = pair == 0 ? k.x : k.z;
      const uint32_t high = pair == 0 ? k.y : k.w;
      AndPopc(acc, low, high, b[c]);
      if (kPlanes == 2 && p == 1) AndPopc(acc, low, high, b[c]);
    }
  }
}

// A lane's query bits of a head tile: both column sets.
template <int kChunks>
struct QueryBits {
  uint32_t low[kChunks];
  uint32_t high[kChunks];

  __device__ QueryBits(const uint2* planes, int lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint2 b = planes[c * 32 + lane];
      low[c] = b.x;
      high[c] = b.y;
    }
  }
};

// Integer sums of four query heads over a group's keys: totals[tile] is of
// head lane % 4 and key lane / 4 of the tile: offset + 4 sum w u - 30 sum u,
// w the stored 4-bit weight.
template <int kPlanes, int kChunks>
__device__ inline void GroupTotals(const uint4 (&codes)[kPlanes][kChunks], const int32_t (&ones)[4],
                                   const QueryBits<kChunks>& query, int32_t offset,
                                   int32_t (&totals)[4]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    int32_t a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
    WeightedPopc<kPlanes, kChunks>(codes, pair, query.low, a);
    WeightedPopc<kPlanes, kChunks>(codes, pair, query.high, b);
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      const int32_t sum = (a[2 * key] + 2 * a[2 * key + 1]) + 4 * (b[2 * key] + 2 * b[2 * key + 1]);
      totals[2 * pair + key] = 4 * sum + (offset - 30 * ones[2 * pair + key]);
    }
  }
}

// sum u of each tile's key, as the lane's key of GroupTotals.
template <int kPlanes, int kChunks>
__device__ inline void GroupOnes(const uint4 (&codes)[kPlanes][kChunks], int32_t (&ones)[4]) {
  uint32_t all[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) all[c] = kFullWarp;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    int32_t acc[4] = {0, 0, 0, 0};
    WeightedPopc<kPlanes, kChunks>(codes, pair, all, acc);
    ones[2 * pair] = acc[0];
    ones[2 * pair + 1] = acc[2];
  }
}

// x_h of a total: the estimated logit times log2(e).
__device__ inline float ScaledLogit(int32_t total, float coefficient, float factor) {
  return coefficient * static_cast<float>(total) * factor;
}

// Factors of the lane's keys in a group's four tiles.
__device__ inline void LoadFactors(const CodeTiling& tiling, const std::byte* page, int group,
                                   int lane, float (&factors)[4]) {
  const auto* at = reinterpret_cast<const uint2*>(page + tiling.factor_offset_bytes()) +
                   group * (kGroupTokenCount / 4) + lane / 4;
  const uint2 raw = *at;
  factors[0] = __uint_as_float(raw.x << 16);
  factors[1] = __uint_as_float(raw.x & 0xFFFF0000u);
  factors[2] = __uint_as_float(raw.y << 16);
  factors[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}

// Per query head, what a block's warps read again and again.
struct HeadTerms {
  int32_t offset;
  float coefficient;
  float reference;
  float weight;
};

// Estimated logits of the sampled pages and their largest; see ReferencePages.
// A warp takes 32 tokens; grid (blocks, units). Shared memory: query planes.
template <int kPlanes, int kChunks>
__global__ void ReferenceKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint2 planes[];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t groups = pages.count * kGroupsPerPage;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= groups) return;
  const int tiles = (shape.group + 3) / 4;
  const int lane = threadIdx.x % 32;
  LoadQueryPlanes(u, tiles, shape.tiling.words, kChunks, planes);
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < groups;
       i += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t page_index = pages.first + pages.step * (i / kGroupsPerPage);
    const int group = static_cast<int>(i % kGroupsPerPage);
    const std::byte* page = u.code_pages[page_index];
    uint4 codes[kPlanes][kChunks];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        codes[p][c] = LoadCodes(shape.tiling, page, p, group, c, lane);
      }
    }
    float factors[4];
    LoadFactors(shape.tiling, page, group, lane, factors);
    int32_t ones[4];
    GroupOnes(codes, ones);
    for (int tile = 0; tile < tiles; ++tile) {
      const int head = tile * 4 + lane % 4;
      const bool present = head < shape.group;
      const int32_t offset = present ? state.offset[head] : 0;
      const float coefficient = present ? state.coefficient[head] : 0;
      int32_t totals[4];
      GroupTotals<kPlanes, kChunks>(
          codes, ones, QueryBits<kChunks>(planes + tile * kChunks * 32, lane), offset, totals);
      float max = -INFINITY;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float x = ScaledLogit(totals[t], coefficient, factors[t]);
        x = x < kScoreLogitMax ? x : kScoreLogitMax;
        x = x > -kScoreLogitMax ? x : -kScoreLogitMax;
        const int slot = group * kGroupTokenCount + t * 8 + lane / 4;
        const int64_t token = page_index * kPageTokenCount + slot;
        if (present) {
          u.sample_logits[head * u.sample_token_count + i / kGroupsPerPage * kPageTokenCount +
                          slot] = x;
          if (token >= u.begin && token < u.end) max = fmaxf(max, x);
        }
      }
      for (const int offset_bit : {4, 8, 16}) {
        max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset_bit));
      }
      if (present && lane < 4) atomicMax(&state.reference[head], OrderedBits(max));
    }
  }
}

// sum 2^(x - M) in fixed point over the sample: the same in every order. Grid
// (blocks, units, heads).
__global__ void ReferenceMassKernel(const UnitRequest* units) {
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t count = pages.count * kPageTokenCount;
  if (static_cast<int64_t>(blockIdx.x) * blockDim.x >= count) return;
  const int h = blockIdx.z;
  const float max = FromOrderedBits(state.reference[h]);
  unsigned long long sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t token =
        (pages.first + pages.step * (i / kPageTokenCount)) * kPageTokenCount + i % kPageTokenCount;
    if (token < u.begin || token >= u.end) continue;
    sum += ScoreMass(u.sample_logits[h * u.sample_token_count + i], max);
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(&state.mass[h], sum);
}

__device__ inline void AddToGlobal(const uint32_t* shared_histogram, int bin_count,
                                   uint32_t* histogram) {
  for (int i = threadIdx.x; i < bin_count; i += blockDim.x) {
    const uint32_t count = shared_histogram[i];
    if (count > 0) atomicAdd(&histogram[i], count);
  }
}

// A page's tokens and which of them are candidates, by slot.
struct PageSlots {
  uint16_t* bins;
  int begin;
  int end;

  __device__ PageSlots(const UnitRequest& u, int64_t page_index)
      : bins(u.bins + page_index * kPageTokenCount),
        begin(static_cast<int>(max(u.begin - page_index * kPageTokenCount, int64_t{0}))),
        end(static_cast<int>(min(u.end - page_index * kPageTokenCount, int64_t{kPageTokenCount}))) {
  }

  // Bins have room for whole pages.
  __device__ void Store(int slot, uint32_t bin, uint32_t* histogram) const {
    const bool candidate = slot >= begin && slot < end;
    if (candidate) atomicAdd(&histogram[bin], 1u);
    bins[slot] = candidate ? static_cast<uint16_t>(bin) : kNoBin;
  }
};

// Score bins of every token, the same bits as the CPU device's, and the
// unit's histogram. Grid (blocks, units); a warp takes a page. Shared memory:
// histogram [bin_count], query planes, a PageRing a warp.
// With kOneTile the group has at most four heads, and what is said of them
// stays in registers.
template <int kPlanes, int kChunks, bool kMass, bool kOneTile>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    ScoreAsymmetricKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= page_count) return;
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  const int tiles = (shape.group + 3) / 4;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  LoadQueryPlanes(u, tiles, shape.tiling.words, kChunks, planes);
  if (threadIdx.x < kGroupMax) {
    HeadTerms terms = {0, 0, 0, 0};  // of a head that is not there
    if (threadIdx.x < shape.group) {
      const UnitState& state = *u.state;
      terms = {state.offset[threadIdx.x], state.coefficient[threadIdx.x],
               FromOrderedBits(state.reference[threadIdx.x]),
               ScoreHeadWeight(state.mass[threadIdx.x])};
    }
    heads[threadIdx.x] = terms;
  }
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  const int page_bytes = shape.tiling.page_bytes();
  PageRing ring(reinterpret_cast<std::byte*>(planes + tiles * kChunks * 32) +
                    threadIdx.x / 32 * PageRing::kDepth * page_bytes,
                page_bytes);
  int64_t page_index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  // Addresses of pages are known two pages ahead, the pages come one ahead.
  const auto address = [&](int64_t p) { return p < page_count ? u.code_pages[p] : nullptr; };
  ring.Bring(address(page_index), lane);
  const std::byte* next = address(page_index + step);
  // Groups that are scored side by side.
  constexpr int kAhead = kPlanes * kChunks <= 2 ? 2 : 1;
  const HeadTerms first_terms = heads[lane % 4];
  float first_weights[4];
#pragma unroll
  for (int h = 0; h < 4; ++h) first_weights[h] = heads[h].weight;
  const QueryBits<kChunks> first_query(planes, lane);
  for (; page_index < page_count; page_index += step) {
    ring.Bring(next, lane);
    next = address(page_index + 2 * step);
    const std::byte* page = ring.Take();
    const PageSlots slots(u, page_index);
#pragma unroll 1
    for (int first = 0; first < kGroupsPerPage; first += kAhead) {
      uint4 codes[kAhead][kPlanes][kChunks];
      float factors[kAhead][4];
      int32_t ones[kAhead][4];
      float scores[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            codes[a][p][c] = LoadCodes(shape.tiling, page, p, first + a, c, lane);
          }
        }
        LoadFactors(shape.tiling, page, first + a, lane, factors[a]);
        GroupOnes(codes[a], ones[a]);
      }
      // Adds the tile's four heads to the scores.
      const auto add_heads = [&](int tile, const QueryBits<kChunks>& query, const HeadTerms& terms,
                                 const float(&weights)[4]) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          int32_t totals[4];
          GroupTotals<kPlanes, kChunks>(codes[a], ones[a], query, terms.offset, totals);
          float e[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const float x = ScaledLogit(totals[t], terms.coefficient, factors[a][t]);
            e[t] = ScoreExp2(x - terms.reference);
          }
          ExchangeHeads(e, lane);
          // Heads that are not there weigh nothing, and their e is finite.
#pragma unroll
          for (int h = 0; h < 4; ++h) scores[a] = fmaf(e[h], weights[h], scores[a]);
          if (!kMass) continue;
          const int64_t token =
              page_index * kPageTokenCount + (first + a) * kGroupTokenCount + TokenOfLane(lane);
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            if (tile * 4 + h >= shape.group || token >= u.n) continue;
            u.head_bins[(tile * 4 + h) * u.n + token] =
                static_cast<uint16_t>(__float_as_uint(e[h]) >> kScoreBinShift);
          }
        }
      };
      if (kOneTile) {
        add_heads(0, first_query, first_terms, first_weights);
      } else {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          const HeadTerms* of_tile = heads + tile * 4;
          const float weights[4] = {of_tile[0].weight, of_tile[1].weight, of_tile[2].weight,
                                    of_tile[3].weight};
          add_heads(tile, QueryBits<kChunks>(planes + tile * kChunks * 32, lane), of_tile[lane % 4],
                    weights);
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        slots.Store((first + a) * kGroupTokenCount + TokenOfLane(lane),
                    __float_as_uint(scores[a]) >> kScoreBinShift, histogram);
      }
    }
    __syncwarp();  // before the next page takes this one's place
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

// Query bits of hamming: eight columns, planes 0 to 2 of the heads' counts,
// the key's own bits (row 8), planes 3 and 4.
__device__ inline void LoadCountPlanes(const UnitRequest& u, int words, int chunks,
                                       uint32_t* planes) {
  for (int i = threadIdx.x; i < chunks * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int column = lane / 4;
    const int word = i / 32 * kChunkWords + lane % 4;
    const int row = column < 3 ? column : column == 3 ? 8 : column < 6 ? column - 1 : -1;
    planes[i] = word < words && row >= 0 ? u.query_planes[row * words + word] : 0;
  }
}

// Matching bits summed over the group: 2 sum c k - G sum k + sum (G - c), c_j
// the heads whose bit j is set. Grid and shared memory as above.
__global__ void __launch_bounds__(kScoreThreads)
    ScoreHammingKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= page_count) return;
  const int chunks = shape.tiling.chunks();
  uint32_t* histogram = shared;
  uint32_t* planes = shared + shape.bin_count;
  for (int i = threadIdx.x; i < shape.bin_count; i += blockDim.x) histogram[i] = 0;
  LoadCountPlanes(u, shape.tiling.words, chunks, planes);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int32_t offset = u.state->offset[0];
  // Weights of the lane's columns 2 (lane % 4) and the next.
  const int part = lane % 4;
  const int32_t even = part == 0 ? 2 : part == 1 ? 8 : part == 2 ? 16 : 0;
  const int32_t odd = part == 0 ? 4 : part == 1 ? -shape.group : part == 2 ? 32 : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  // Of a page the plane of signs alone, which lies as plane 0 in the ring.
  const int plane_bytes = shape.tiling.words * kPageTokenCount * 4;
  const int64_t plane_offset = int64_t{shape.tiling.planes - 1} * plane_bytes;
  const int head_words = (shape.bin_count + chunks * 32 + 3) / 4 * 4;
  PageRing ring(reinterpret_cast<std::byte*>(shared + head_words) +
                    threadIdx.x / 32 * PageRing::kDepth * plane_bytes,
                plane_bytes);
  int64_t page_index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  const auto address = [&](int64_t p) -> const std::byte* {
    return p < page_count ? u.code_pages[p] + plane_offset : nullptr;
  };
  ring.Bring(address(page_index), lane);
  const std::byte* next = address(page_index + step);
  for (; page_index < page_count; page_index += step) {
    ring.Bring(next, lane);
    next = address(page_index + 2 * step);
    const std::byte* page = ring.Take();
    const PageSlots slots(u, page_index);
    int32_t acc[kGroupsPerPage][2][4] = {};
    for (int c = 0; c < chunks; ++c) {
      uint4 codes[kGroupsPerPage];
#pragma unroll
      for (int g = 0; g < kGroupsPerPage; ++g) {
        codes[g] = LoadCodes(shape.tiling, page, 0, g, c, lane);
      }
      const uint32_t b = planes[c * 32 + lane];
#pragma unroll
      for (int g = 0; g < kGroupsPerPage; ++g) {
        AndPopc(acc[g][0], codes[g].x, codes[g].y, b);
        AndPopc(acc[g][1], codes[g].z, codes[g].w, b);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroupsPerPage; ++g) {
      // Sums over the columns; each exchange halves the tiles that a lane holds.
      int32_t sums[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        sums[t] = even * acc[g][t / 2][t % 2 * 2] + odd * acc[g][t / 2][t % 2 * 2 + 1];
      }
      const bool high = (lane & 2) != 0, low = (lane & 1) != 0;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int32_t received = __shfl_xor_sync(kFullWarp, high ? sums[t] : sums[t + 2], 2);
        sums[t] = (high ? sums[t + 2] : sums[t]) + received;
      }
      const int32_t received = __shfl_xor_sync(kFullWarp, low ? sums[0] : sums[1], 1);
      const int32_t sum = (low ? sums[1] : sums[0]) + received;
      slots.Store(g * kGroupTokenCount + part * 8 + lane / 4, static_cast<uint32_t>(sum + offset),
                  histogram);
    }
    __syncwarp();  // before the next page takes this one's place
  }
  __syncthreads();
  AddToGlobal(histogram, shape.bin_count, u.histogram);
}

}  // namespace spillway::cuda
