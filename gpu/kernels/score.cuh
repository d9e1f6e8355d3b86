#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/score.h"

// Scores of codes on binary tensor cores, and their histogram.
//
// A warp takes 32 tokens of a code page at a time, as four tiles of 8: the
// instruction m16n8k128 .and.popc multiplies 16 rows of query bits with the
// tile's keys. Memory is the limit, not the tensor cores.
namespace spillway::cuda {

// acc += popcounts of the bits that rows of a and columns of b share. Lane:
// a0 row lane / 4, a1 row lane / 4 + 8, word lane % 4; b key lane / 4, word
// lane % 4; acc[0..1] row lane / 4, keys 2 (lane % 4) + {0, 1}; acc[2..3] row
// lane / 4 + 8.
__device__ inline void AndPopc(int32_t (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The words of a lane's key of each of a group's four tiles, for one plane and
// chunk; 0 where the chunk has no such word.
__device__ inline uint4 LoadCodes(const CodeTiling& tiling, const std::byte* page, int plane,
                                  int group, int chunk, int lane) {
  const int width = tiling.chunk_words(chunk);
  const int word = lane % 4;
  if (word >= width) return make_uint4(0, 0, 0, 0);
  const uint32_t* at = reinterpret_cast<const uint32_t*>(page) +
                       tiling.chunk_offset(plane, group, chunk) + (lane / 4 * width + word) * 4;
  return __ldg(reinterpret_cast<const uint4*>(at));
}

// Which token of a group of 32 a lane holds once four heads were exchanged.
__device__ inline int TokenOfLane(int lane) {
  return (lane / 4 % 4) * 8 + 2 * (lane % 4) + lane / 16;
}

// a[tile] of head `lane / 4 % 4` becomes a[head] of tile `lane / 4 % 4`.
__device__ inline void ExchangeHeads(float (&a)[4], int lane) {
  const bool odd = (lane & 4) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const float sent = odd ? a[j] : a[j + 1];
    const float received = __shfl_xor_sync(kFullWarp, sent, 4);
    if (odd) {
      a[j] = received;
    } else {
      a[j + 1] = received;
    }
  }
  const bool high = (lane & 8) != 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float sent = high ? a[j] : a[j + 2];
    const float received = __shfl_xor_sync(kFullWarp, sent, 8);
    if (high) {
      a[j] = received;
    } else {
      a[j + 2] = received;
    }
  }
}

// Query bits of a block's unit in shared memory: per head tile and chunk the
// lane's two words.
__device__ inline void LoadQueryPlanes(const UnitRequest& u, int tiles, int words, int chunks,
                                       uint2* planes) {
  for (int i = threadIdx.x; i < tiles * chunks * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int chunk = i / 32 % chunks;
    const int tile = i / 32 / chunks;
    const int word = chunk * kChunkWords + lane % 4;
    const uint32_t* rows = u.query_planes + tile * 16 * words;
    uint2 pair = make_uint2(0, 0);
    if (word < words) {
      pair.x = rows[lane / 4 * words + word];
      pair.y = rows[(lane / 4 + 8) * words + word];
    }
    planes[i] = pair;
  }
}

// Integer sums of four query heads over a group's keys: totals[tile] is of
// head lane / 4 % 4 and key 2 (lane % 4) + lane / 16 of the tile. Without the
// head's offset: 4 sum w u - 30 sum u, w the stored 4-bit weight.
template <int kPlanes, int kChunks>
__device__ inline void GroupTotals(const uint4 (&codes)[kPlanes][kChunks], const int32_t (&ones)[4],
                                   const uint2* planes, int lane, int32_t (&totals)[4]) {
  const bool high = lane >= 16;
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    int32_t acc[4] = {0, 0, 0, 0};
#pragma unroll
    for (int p = kPlanes - 1; p >= 0; --p) {
      if (p + 1 < kPlanes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] *= 2;
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint2 a = planes[c * 32 + lane];
        const uint4& b = codes[p][c];
        AndPopc(acc, a.x, a.y, tile == 0 ? b.x : tile == 1 ? b.y : tile == 2 ? b.z : b.w);
      }
    }
    // Rows are plane * 4 + head: this lane has planes 0 and 2, or 1 and 3.
    const int32_t even = (acc[0] + 4 * acc[2]) << (high ? 1 : 0);
    const int32_t odd = (acc[1] + 4 * acc[3]) << (high ? 1 : 0);
    const int32_t received = __shfl_xor_sync(kFullWarp, high ? even : odd, 16);
    totals[tile] = 4 * ((high ? odd : even) + received) - 30 * ones[tile];
  }
}

// sum u of each tile's key, as the lane's key of GroupTotals.
template <int kPlanes, int kChunks>
__device__ inline void GroupOnes(const uint4 (&codes)[kPlanes][kChunks], int lane,
                                 int32_t (&ones)[4]) {
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    int32_t acc[4] = {0, 0, 0, 0};
#pragma unroll
    for (int p = kPlanes - 1; p >= 0; --p) {
      if (p + 1 < kPlanes) {
        acc[0] *= 2;
        acc[1] *= 2;
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4& b = codes[p][c];
        AndPopc(acc, kFullWarp, kFullWarp,
                tile == 0   ? b.x
                : tile == 1 ? b.y
                : tile == 2 ? b.z
                            : b.w);
      }
    }
    ones[tile] = lane >= 16 ? acc[1] : acc[0];
  }
}

// x_h of a total: the estimated logit times log2(e).
__device__ inline float ScaledLogit(int32_t total, int32_t offset, float coefficient,
                                    float factor) {
  return coefficient * static_cast<float>(total + offset) * factor;
}

// Factors of the lane's keys in a group's four tiles.
__device__ inline void LoadFactors(const CodeTiling& tiling, const std::byte* page, int group,
                                   int lane, float (&factors)[4]) {
  const auto* at = reinterpret_cast<const uint16_t*>(page + tiling.factor_offset_bytes()) +
                   group * kGroupTokenCount + 2 * (lane % 4) + lane / 16;
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) factors[tile] = BFloat16ToFloat(__ldg(at + 8 * tile));
}

// Per query head, what a block's warps read again and again.
struct HeadTerms {
  int32_t offset;
  float coefficient;
  float reference;
  float weight;
};

// Estimated logits of the sampled pages and their largest; see ReferencePages.
// A warp a page; grid (blocks, units). Shared memory: query planes.
template <int kPlanes, int kChunks>
__global__ void ReferenceKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint2 planes[];
  const UnitRequest& u = units[blockIdx.y];
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= pages.count) return;
  const int tiles = (shape.group + 3) / 4;
  const int lane = threadIdx.x % 32;
  LoadQueryPlanes(u, tiles, shape.tiling.words, kChunks, planes);
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < pages.count;
       i += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t page_index = pages.first + pages.step * i;
    const std::byte* page = u.code_pages[page_index];
    for (int tile = 0; tile < tiles; ++tile) {
      const int head = tile * 4 + lane / 4 % 4;
      const int32_t offset = head < shape.group ? state.offset[head] : 0;
      const float coefficient = head < shape.group ? state.coefficient[head] : 0;
      float max = -INFINITY;
      for (int group = 0; group < kGroupsPerPage; ++group) {
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
        int32_t ones[4], totals[4];
        GroupOnes(codes, lane, ones);
        GroupTotals(codes, ones, planes + tile * kChunks * 32, lane, totals);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float x = ScaledLogit(totals[t], offset, coefficient, factors[t]);
          x = x < kScoreLogitMax ? x : kScoreLogitMax;
          x = x > -kScoreLogitMax ? x : -kScoreLogitMax;
          const int slot = group * kGroupTokenCount + t * 8 + 2 * (lane % 4) + lane / 16;
          const int64_t token = page_index * kPageTokenCount + slot;
          if (head < shape.group) {
            u.sample_logits[head * u.sample_token_count + i * kPageTokenCount + slot] = x;
            if (token >= u.begin && token < u.end) max = fmaxf(max, x);
          }
        }
      }
      // Lanes of one head differ in bits 0, 1 and 4.
      for (const int offset_bit : {1, 2, 16}) {
        max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset_bit));
      }
      if (head < shape.group && (lane & 19) == 0) {
        atomicMax(&state.reference[head], OrderedBits(max));
      }
    }
  }
}

// sum 2^(x - M) in fixed point over the sample: the same in every order. Grid
// (blocks, units).
__global__ void ReferenceMassKernel(AttendShape shape, const UnitRequest* units) {
  const UnitRequest& u = units[blockIdx.y];
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t count = pages.count * kPageTokenCount;
  if (static_cast<int64_t>(blockIdx.x) * blockDim.x >= count) return;
  for (int h = 0; h < shape.group; ++h) {
    const float max = FromOrderedBits(state.reference[h]);
    unsigned long long sum = 0;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
      const int64_t token = (pages.first + pages.step * (i / kPageTokenCount)) * kPageTokenCount +
                            i % kPageTokenCount;
      if (token < u.begin || token >= u.end) continue;
      sum += ScoreMass(u.sample_logits[h * u.sample_token_count + i], max);
    }
    sum = WarpSum(sum);
    if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(&state.mass[h], sum);
  }
}

__device__ inline void AddToGlobal(const uint32_t* shared_histogram, int bin_count,
                                   uint32_t* histogram) {
  for (int i = threadIdx.x; i < bin_count; i += blockDim.x) {
    const uint32_t count = shared_histogram[i];
    if (count > 0) atomicAdd(&histogram[i], count);
  }
}

// Tokens outside the candidates' range have no bin.
__device__ inline void StoreBin(const UnitRequest& u, int64_t token, uint32_t bin,
                                uint32_t* histogram) {
  const bool candidate = token >= u.begin && token < u.end;
  if (candidate) atomicAdd(&histogram[bin], 1u);
  if (token < u.n) u.bins[token] = candidate ? static_cast<uint16_t>(bin) : kNoBin;
}

// Score bins of every token, the same bits as the CPU device's, and the
// unit's histogram. Grid (blocks, units); a warp takes a page. Shared memory:
// histogram [bin_count], query planes.
template <int kPlanes, int kChunks, bool kMass>
__global__ void __launch_bounds__(512)
    ScoreAsymmetricKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  const UnitRequest& u = units[blockIdx.y];
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= page_count) return;
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  const int tiles = (shape.group + 3) / 4;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  LoadQueryPlanes(u, tiles, shape.tiling.words, kChunks, planes);
  if (threadIdx.x < shape.group) {
    const UnitState& state = *u.state;
    heads[threadIdx.x] = {state.offset[threadIdx.x], state.coefficient[threadIdx.x],
                          FromOrderedBits(state.reference[threadIdx.x]),
                          ScoreHeadWeight(state.mass[threadIdx.x])};
  }
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  // Groups whose codes are loaded together: enough to cover memory's latency.
  constexpr int kAhead = kPlanes * kChunks <= 2 ? 4 : kPlanes * kChunks <= 4 ? 2 : 1;
  int64_t page_index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  const std::byte* next_page = page_index < page_count ? u.code_pages[page_index] : nullptr;
  for (; page_index < page_count; page_index += step) {
    const std::byte* page = next_page;
    if (page_index + step < page_count) next_page = u.code_pages[page_index + step];
#pragma unroll 1
    for (int first = 0; first < kGroupsPerPage; first += kAhead) {
      uint4 codes[kAhead][kPlanes][kChunks];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            codes[a][p][c] = LoadCodes(shape.tiling, page, p, first + a, c, lane);
          }
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int group = first + a;
        const int64_t token =
            page_index * kPageTokenCount + group * kGroupTokenCount + TokenOfLane(lane);
        float factors[4];
        LoadFactors(shape.tiling, page, group, lane, factors);
        int32_t ones[4];
        GroupOnes(codes[a], lane, ones);
        float score = 0;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          int32_t totals[4];
          GroupTotals(codes[a], ones, planes + tile * kChunks * 32, lane, totals);
          const int head = tile * 4 + lane / 4 % 4;
          const HeadTerms terms = heads[head < shape.group ? head : 0];
          float e[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const float x = ScaledLogit(totals[t], terms.offset, terms.coefficient, factors[t]);
            e[t] = ScoreExp2(x - terms.reference);
          }
          ExchangeHeads(e, lane);
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            if (tile * 4 + h >= shape.group) break;
            score = fmaf(e[h], heads[tile * 4 + h].weight, score);
            if (kMass && token < u.n) {
              u.head_bins[(tile * 4 + h) * u.n + token] =
                  static_cast<uint16_t>(__float_as_uint(e[h]) >> kScoreBinShift);
            }
          }
        }
        StoreBin(u, token, __float_as_uint(score) >> kScoreBinShift, histogram);
      }
    }
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

// Matching bits summed over the group: 2 sum c k - G sum k + sum (G - c), c_j
// the heads whose bit j is set. Grid and shared memory as above.
__global__ void __launch_bounds__(512)
    ScoreHammingKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint32_t shared[];
  const UnitRequest& u = units[blockIdx.y];
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= page_count) return;
  const int chunks = shape.tiling.chunks();
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + (shape.bin_count + 1) / 2 * 2);
  for (int i = threadIdx.x; i < shape.bin_count; i += blockDim.x) histogram[i] = 0;
  LoadQueryPlanes(u, 1, shape.tiling.words, chunks, planes);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int row = lane / 4;
  const int32_t offset = u.state->offset[0];
  // Row 8 counts the key's own bits.
  const int32_t weight = row < 5 ? 2 << row : 0;
  const int32_t ones_weight = row == 0 ? -shape.group : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  const int plane = shape.tiling.planes - 1;  // signs
  int64_t page_index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  const std::byte* next_page = page_index < page_count ? u.code_pages[page_index] : nullptr;
  for (; page_index < page_count; page_index += step) {
    const std::byte* page = next_page;
    if (page_index + step < page_count) next_page = u.code_pages[page_index + step];
    int32_t acc[kGroupsPerPage][4][4] = {};
    for (int c = 0; c < chunks; ++c) {
      uint4 codes[kGroupsPerPage];
#pragma unroll
      for (int g = 0; g < kGroupsPerPage; ++g) {
        codes[g] = LoadCodes(shape.tiling, page, plane, g, c, lane);
      }
      const uint2 a = planes[c * 32 + lane];
#pragma unroll
      for (int g = 0; g < kGroupsPerPage; ++g) {
        AndPopc(acc[g][0], a.x, a.y, codes[g].x);
        AndPopc(acc[g][1], a.x, a.y, codes[g].y);
        AndPopc(acc[g][2], a.x, a.y, codes[g].z);
        AndPopc(acc[g][3], a.x, a.y, codes[g].w);
      }
    }
    const bool high = lane >= 16, middle = (lane & 8) != 0, odd = (lane & 4) != 0;
#pragma unroll
    for (int g = 0; g < kGroupsPerPage; ++g) {
      // Sums over the eight rows; each exchange halves what a lane holds:
      // first keys 2 t + {0, 1}, then tiles.
      int32_t sums[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int32_t even = weight * acc[g][t][0] + ones_weight * acc[g][t][2];
        const int32_t other = weight * acc[g][t][1] + ones_weight * acc[g][t][3];
        sums[t] = (high ? other : even) + __shfl_xor_sync(kFullWarp, high ? even : other, 16);
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int32_t received = __shfl_xor_sync(kFullWarp, middle ? sums[t] : sums[t + 2], 8);
        sums[t] = (middle ? sums[t + 2] : sums[t]) + received;
      }
      const int32_t received = __shfl_xor_sync(kFullWarp, odd ? sums[0] : sums[1], 4);
      const int32_t sum = (odd ? sums[1] : sums[0]) + received;
      const int tile = (middle ? 2 : 0) + (odd ? 1 : 0);
      const int64_t token = page_index * kPageTokenCount + g * kGroupTokenCount + tile * 8 +
                            2 * (lane % 4) + (high ? 1 : 0);
      StoreBin(u, token, static_cast<uint32_t>(sum + offset), histogram);
    }
  }
  __syncthreads();
  AddToGlobal(histogram, shape.bin_count, u.histogram);
}

}  // namespace spillway::cuda
