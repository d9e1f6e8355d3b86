#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/page_index.h"

// Products of codes and query bits on binary tensor cores.
//
// A warp processes 32 tokens of a code page at a time, as two pairs of octets. One instruction
// m16n8k128 .and.popc multiplies the 16 keys of a pair with a set of eight columns of query bits,
// one column per (head, plane). Two column sets hold four planes of four heads, so that a lane ends
// up with all planes of one head for two keys of the pair. Memory should be the limit, so the code
// uses few instructions per key.
namespace spillway::cuda {

// acc += number of bits that are set in both a row of a and a column of b. A lane passes
// word lane % 4 of row lane / 4 (a0), of row lane / 4 + 8 (a1) and of column lane / 4 (b). Its
// acc[0..1] are for row lane / 4 and columns 2 (lane % 4) + {0, 1}, acc[2..3] for row lane / 4 + 8.
__device__ inline void AndPopc(int32_t (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Word lane % 4, in one plane and fragment, of the lane's four keys: key lane / 4 of each octet of
// the tile. 0 if the fragment has no such word.
__device__ inline uint4 LoadCodes(const CodeTiling& tiling, const std::byte* page, int plane,
                                  int tile, int fragment, int lane) {
  const int width = tiling.fragment_words(fragment);
  const int word = lane % 4;
  if (word >= width) return make_uint4(0, 0, 0, 0);
  const uint32_t* at = reinterpret_cast<const uint32_t*>(page) +
                       tiling.fragment_offset(plane, tile, fragment) +
                       (lane / 4 * width + word) * 4;
  return *reinterpret_cast<const uint4*>(at);
}

// The token of a tile that a lane holds after ExchangeHeads().
__device__ inline int TokenOfLane(int lane) { return (lane % 4) * 8 + lane / 4; }

// Transposes among each four lanes: a[octet] of head lane % 4 becomes a[head] of octet lane % 4.
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

// Loads the unit's query bits to shared memory, planes [quartets][fragments][32]: each lane's words
// of both column sets. Column 2 head + plane % 2 of set plane / 2 is row plane * 4 + head of
// query_planes. The caller synchronises.
__device__ inline void LoadQueryPlanes(const UnitRequest& u, int quartets, int words, int fragments,
                                       uint2* planes) {
  for (int i = threadIdx.x; i < quartets * fragments * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int fragment = i / 32 % fragments;
    const int quartet = i / 32 / fragments;
    const int word = fragment * kFragmentWords + lane % 4;
    const int head = lane / 4 / 2;
    const int plane = lane / 4 % 2;
    const uint32_t* rows = u.query_planes + quartet * 16 * words;
    uint2 pair = make_uint2(0, 0);
    if (word < words) {
      pair.x = rows[(plane * 4 + head) * words + word];
      pair.y = rows[((plane + 2) * 4 + head) * words + word];
    }
    planes[i] = pair;
  }
}

// A lane's query bits of a quartet: its words of column set 0 (low) and 1 (high).
template <int kFragments>
struct QueryBits {
  uint32_t low[kFragments];
  uint32_t high[kFragments];

  __device__ QueryBits(const uint2* planes, int lane) {
#pragma unroll
    for (int c = 0; c < kFragments; ++c) {
      const uint2 b = planes[c * 32 + lane];
      low[c] = b.x;
      high[c] = b.y;
    }
  }
};

// Calls f(set, fragment, low, high) for all planes of a pair of octets. Set p / 2 of plane p weighs
// 4^(p / 2). Odd planes are passed twice, so that no sum has to be doubled.
template <int kPlanes, int kFragments, typename F>
__device__ inline void ForPlanes(const uint4 (&codes)[kPlanes][kFragments], int pair, F f) {
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
    for (int c = 0; c < kFragments; ++c) {
      const uint4& k = codes[p][c];
      const uint32_t low = pair == 0 ? k.x : k.z;
      const uint32_t high = pair == 0 ? k.y : k.w;
      f(p / 2, c, low, high);
      if (p % 2 == 1) f(p / 2, c, low, high);
    }
  }
}

// Integer sums of four query heads over a tile's keys. totals[octet] is for head lane % 4 and key
// lane / 4 of the octet: offset + 4 sum w u - 30 sum u, w the stored 4-bit weight, u the key's
// code. ones: from TileOnes().
template <int kPlanes, int kFragments>
__device__ inline void TileTotals(const uint4 (&codes)[kPlanes][kFragments],
                                  const int32_t (&ones)[4], const QueryBits<kFragments>& query,
                                  int32_t offset, int32_t (&totals)[4]) {
  // The query's planes 2 and 3 count 4 times: they go to the next set.
  constexpr int kSets = (kPlanes - 1) / 2 + 2;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    int32_t acc[kSets][4] = {};
    ForPlanes(codes, pair, [&](int set, int c, uint32_t low, uint32_t high) {
      AndPopc(acc[set], low, high, query.low[c]);
      AndPopc(acc[set + 1], low, high, query.high[c]);
    });
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      int32_t sum = 0;
#pragma unroll
      for (int set = kSets - 1; set >= 0; --set) {
        sum = 4 * sum + (acc[set][2 * key] + 2 * acc[set][2 * key + 1]);
      }
      totals[2 * pair + key] = 4 * sum + (offset - 30 * ones[2 * pair + key]);
    }
  }
}

// ones[octet] = sum u of key lane / 4 of the octet.
template <int kPlanes, int kFragments>
__device__ inline void TileOnes(const uint4 (&codes)[kPlanes][kFragments], int lane,
                                int32_t (&ones)[4]) {
  // Even columns sum up set 0, odd ones set 1.
  const uint32_t even = lane / 4 % 2 == 0 ? 0xFFFFFFFFu : 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    int32_t acc[4] = {0, 0, 0, 0};
    ForPlanes(codes, pair, [&](int set, int, uint32_t low, uint32_t high) {
      AndPopc(acc, low, high, set == 0 ? even : ~even);
    });
    ones[2 * pair] = acc[0] + 4 * acc[1];
    ones[2 * pair + 1] = acc[2] + 4 * acc[3];
  }
}

// A total as EstimatedLogit() takes it.
__device__ inline float ScaledTotal(int32_t total, float coefficient) {
  return coefficient * static_cast<float>(total);
}

// The factors of the lane's four keys: key lane / 4 of each octet of the tile.
__device__ inline void LoadFactors(const CodeTiling& tiling, const std::byte* page, int tile,
                                   int lane, float (&factors)[4]) {
  const auto* at = reinterpret_cast<const uint2*>(page + tiling.factor_offset_bytes()) +
                   tile * (kCodeTileTokens / 4) + lane / 4;
  const uint2 raw = *at;
  factors[0] = __uint_as_float(raw.x << 16);
  factors[1] = __uint_as_float(raw.x & 0xFFFF0000u);
  factors[2] = __uint_as_float(raw.y << 16);
  factors[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}

// The norm bytes of the same keys; byte t is that of octet t.
__device__ inline uint32_t LoadNorms(const CodeTiling& tiling, const std::byte* page, int tile,
                                     int lane) {
  const auto* norms = reinterpret_cast<const uint32_t*>(page + tiling.norm_offset_bytes());
  return norms[tile * (kCodeTileTokens / 4) + lane / 4];
}
__device__ inline bool IsStrayNorm(uint32_t norms, int octet) {
  return (norms >> (8 * octet) & 0xFFu) == kStrayNorm;
}
// Whether any of the four keys is a stray.
__device__ inline bool HasStrayNorm(uint32_t norms) {
  static_assert(kStrayNorm == 0xFF);
  // Tests whether a byte of the complement is 0.
  return ((~norms - 0x01010101u) & norms & 0x80808080u) != 0;
}

// Bytes of a code page that scoring reads: all but the centre. A multiple of 16.
__host__ __device__ inline int ScoredBytes(const CodeTiling& tiling) {
  return tiling.centre_offset_bytes();
}

// What the warps of a scoring block need of a query head; in shared memory.
struct HeadTerms {
  int32_t offset;
  float coefficient;
  float reference;
  float weight;
  float shrinkage;  // LevelShrinkage()
};

}  // namespace spillway::cuda
