#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/rank_error.h"
#include "host/core/value_code.h"

// Of coded units: what codes give for the tail, and how far rows may be from it
// (host/core/value_code.h). One block per span of pages. Every sum is made in an order that depends
// on the unit alone.
namespace spillway::cuda {

inline constexpr int kSpanThreads = 32 * kSpanParts;
inline constexpr int kPartPages = kSpanPages / kSpanParts;

// Where the unit's tail is in its bins.
struct TailBins {
  const uint8_t* class_of_bin;  // in shared memory, indexed by BinIndex()
  int bin_count;
  int tie_class;
  int64_t heavy_from;
  int near;  // strata whose tokens all count in predictions: the first ones

  // The stratum of a token, or -1: it is not in the tail.
  __device__ int StratumOf(int bin, int64_t token) const {
    int c = class_of_bin[BinIndex(bin, bin_count)];
    if (c == kClassTie && token < heavy_from) c = tie_class;
    return c < kTailStrataMax ? c : -1;
  }
};

// The four tokens of a page that a lane has: those of row lane % 8 of tile lane / 8.
struct OwnSlots {
  int64_t first;  // token of octet 0
  int stratum[4];

  __device__ OwnSlots(const UnitRequest& u, const TailBins& tail, int64_t page, int lane)
      : first(page * kPageTokenCount + lane / 8 * kCodeTileTokens + lane % 8) {
    uint16_t bins[4];
#pragma unroll
    for (int o = 0; o < 4; ++o) bins[o] = u.bins[first + 8 * o];
#pragma unroll
    for (int o = 0; o < 4; ++o) stratum[o] = tail.StratumOf(bins[o], first + 8 * o);
  }
  // 0xFF in the bytes of tokens of the tail.
  __device__ uint32_t TailMask() const {
    uint32_t mask = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) mask |= stratum[o] >= 0 ? 0xFFu << (8 * o) : 0u;
    return mask;
  }
};

// The lane's four factors, in a page's list of factors.
__device__ inline void LoadOwnFactors(const std::byte* factors, int lane, float (&f)[4]) {
  const uint2 raw = reinterpret_cast<const uint2*>(factors)[lane];
  f[0] = __uint_as_float(raw.x << 16);
  f[1] = __uint_as_float(raw.x & 0xFFFF0000u);
  f[2] = __uint_as_float(raw.y << 16);
  f[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}

__device__ inline uint8_t LevelOf(uint32_t levels, int octet) {
  return static_cast<uint8_t>(levels >> (8 * octet));
}

// Weighs the pages of a part of a span: one warp.
class PageWeigher {
 public:
  // shrinkage [G]: LevelShrinkage(). predicted [strata][G]: of the warp, zeros. Both in shared
  // memory.
  __device__ PageWeigher(const AttendShape& shape, const UnitRequest& u, const TailBins& tail,
                         const float* shrinkage, PredictedPart* predicted)
      : shape_(shape),
        u_(u),
        tail_(tail),
        shrinkage_(shrinkage),
        predicted_(predicted),
        reference_(ReferencePages::Of(u.begin, u.end)),
        square_of_factor_(static_cast<float>(shape.head_dim) *
                          SquareOfFactor(shape.tiling.value_bits)),
        distortion_(static_cast<float>(QuantiserDistortion(shape.tiling.value_bits))),
        inverse_unit_(1 / ValueUnit(u)) {}

  __device__ void Weigh(int64_t page) {
    const std::byte* const codes = u_.code_pages[page];
    const OwnSlots own(u_, tail_, page, lane_);
    const uint32_t mask = own.TailMask();
    float factors[4];
    LoadOwnFactors(codes + shape_.tiling.value_factor_offset_bytes(), lane_, factors);
    for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
      uint32_t levels[4];
      LoadLevels(page, quartet, mask, levels);
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        float sum = 0, largest = 0;
#pragma unroll
        for (int o = 0; o < 4; ++o) {
          const float weight = LevelWeight(LevelOf(levels[h], o));
          sum += weight;
          largest = fmaxf(largest, weight * factors[o]);
        }
        const PageWeights weights = {WarpSum(sum), WarpMax(largest)};
        if (lane_ == 0 && quartet * 4 + h < shape_.group) {
          u_.codes.weights[page * shape_.group + quartet * 4 + h] = weights;
        }
      }
      Predict(page, codes, own, factors, quartet, levels);
    }
  }

 private:
  // The levels of a quartet's heads, 0 for heads beyond the group. Those of tokens outside the tail
  // become 0, also in memory.
  __device__ void LoadLevels(int64_t page, int quartet, uint32_t mask, uint32_t (&levels)[4]) {
    auto* const at = reinterpret_cast<uint32_t*>(
        u_.codes.levels + (page * shape_.group + quartet * 4) * kPageTokenCount);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      levels[h] = quartet * 4 + h < shape_.group ? at[h * 32 + lane_] : 0;
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if ((levels[h] & ~mask) == 0) continue;
      levels[h] &= mask;
      at[h * 32 + lane_] = levels[h];
    }
  }

  __device__ bool IsReference(int64_t page) const {
    const int64_t from = page - reference_.first;
    return from >= 0 && from % reference_.step == 0 && from / reference_.step < reference_.count;
  }

  // Adds the page's tokens that count to the predictions. Tokens of a stratum follow each other.
  __device__ void Predict(int64_t page, const std::byte* codes, const OwnSlots& own,
                          const float (&factors)[4], int quartet, const uint32_t (&levels)[4]) {
    const bool all = IsReference(page);
    bool any = false;
#pragma unroll
    for (int o = 0; o < 4; ++o) any |= Counts(own.stratum[o], all);
    if (!__any_sync(kFullWarp, any)) return;
    float key_factors[4];
    LoadOwnFactors(codes + shape_.tiling.factor_offset_bytes(), lane_, key_factors);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int stratum = own.stratum[o];
      const bool counts = Counts(stratum, all);
      const float factor_square = fminf(key_factors[o] * key_factors[o], kFactorSquareMax);
      const float in_units = factors[o] * inverse_unit_;
      const float value_square = in_units * in_units * square_of_factor_;
      for (unsigned left = __ballot_sync(kFullWarp, counts); left != 0;) {
        const int h = __shfl_sync(kFullWarp, stratum, __ffs(left) - 1);
        const bool member = counts && stratum == h;
        const unsigned members = __ballot_sync(kFullWarp, member);
        left &= ~members;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int g = quartet * 4 + i;
          if (g >= shape_.group) break;
          PredictedTerms terms = {0, 0};
          const uint8_t level = LevelOf(levels[i], o);
          if (member && level != 0) {
            terms = PredictTerms(LevelWeight(level), LogitVariance(factor_square, shrinkage_[g]),
                                 value_square, distortion_);
          }
          terms.of_value = WarpSum(terms.of_value);
          terms.of_centre = WarpSum(terms.of_centre);
          if (lane_ == 0) {
            PredictedPart& part = predicted_[h * shape_.group + g];
            part.of_value += terms.of_value;
            part.of_centre += terms.of_centre;
            part.count += __popc(members);
          }
        }
      }
    }
  }
  __device__ bool Counts(int stratum, bool all) const {
    return stratum >= 0 && (all || stratum < tail_.near);
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const TailBins& tail_;
  const float* const shrinkage_;
  PredictedPart* const predicted_;
  const ReferencePages reference_;
  const float square_of_factor_;
  const float distortion_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
};

// Shared memory of WeighPagesKernel.
__host__ __device__ inline size_t WeighBytes(const AttendShape& shape) {
  return ClassBytes(shape.bin_count) +
         sizeof(PredictedPart) * kSpanParts * kStrataMax * static_cast<size_t>(shape.group);
}

// Sums x^ by page, and predictions by span; sets to 0 the levels of tokens outside the tail. The
// last block of a unit adds up the pages. Grid (spans, units).
__global__ void __launch_bounds__(kSpanThreads)
    WeighPagesKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) uint8_t weigh_memory[];
  __shared__ float shrinkage[kGroupMax];
  __shared__ TailBins tail;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const int strata = state.strata;
  if (!u.coded() || strata == 0 || blockIdx.x >= u.spans()) return;
  const int width = strata * shape.group;
  auto* const predicted =
      reinterpret_cast<PredictedPart*>(weigh_memory + ClassBytes(shape.bin_count));
  for (int i = threadIdx.x; i < ClassBytes(shape.bin_count) / 16; i += kSpanThreads) {
    reinterpret_cast<uint4*>(weigh_memory)[i] = reinterpret_cast<const uint4*>(u.class_of_bin)[i];
  }
  for (int i = threadIdx.x; i < kSpanParts * width; i += kSpanThreads) predicted[i] = {0, 0, 0};
  if (static_cast<int>(threadIdx.x) < shape.group) {
    shrinkage[threadIdx.x] = LevelShrinkage(state.rank_error_scale[threadIdx.x]);
  }
  if (threadIdx.x == 0) {
    int near = 0;
    while (near < strata && state.stratum_count[near] <= kNearStratumTokens) ++near;
    tail = {weigh_memory, shape.bin_count, state.tie_class, state.heavy_from, near};
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  PageWeigher weigher(shape, u, tail, shrinkage, predicted + warp * width);
  const int64_t first = u.scored_page_begin() + int64_t{blockIdx.x} * kSpanPages;
  for (int i = 0; i < kPartPages; ++i) {
    const int64_t page = first + warp * kPartPages + i;
    if (page < u.scored_page_end()) weigher.Weigh(page);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < width; i += kSpanThreads) {
    PredictedPart sum = {0, 0, 0};
    for (int part = 0; part < kSpanParts; ++part) {
      const PredictedPart of_part = predicted[part * width + i];
      sum.of_value += of_part.of_value;
      sum.of_centre += of_part.of_centre;
      sum.count += of_part.count;
    }
    u.codes.predicted[int64_t{blockIdx.x} * kStrataMax * shape.group + i] = sum;
  }
  if (!IsLastBlock(static_cast<int>(u.spans()), state.spans_weighed)) return;
  // One warp per head in turn. Past the L1 cache, because other blocks wrote the sums.
  for (int g = warp; g < shape.group; g += kSpanParts) {
    double sum = 0;
    for (int64_t page = u.scored_page_begin() + threadIdx.x % 32; page < u.scored_page_end();
         page += 32) {
      sum += __ldcg(&u.codes.weights[page * shape.group + g].sum);
    }
    sum = WarpSum(sum);
    if (threadIdx.x % 32 == 0) state.code_sum[g] = sum;
  }
}

// d += a b: a [16][32] and b [32][8], 8 bits each. Lane l has of a row l / 4, four elements from
// 4 (l % 4) on, the same of row + 8, then both from element 16 on; of b the same of column l / 4;
// of d (row l / 4, columns 2 (l % 4) and the next), then the same of row + 8.
__device__ inline void MultiplyBytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Dimensions whose codes a block sums.
inline constexpr int kSummedDims = 128;

// What a block needs of a span; in shared memory.
struct SpanPages {
  const std::byte* codes[kSpanPages];
  bool has_mass[kSpanPages];
  float sums[kSpanPages][kGroupMax];     // of x^
  float largest[kSpanPages][kGroupMax];  // of g x^
  int count;
};

// Sums the codes of a part of a span: one warp. kWidth: bits of a field. kHeads: 8 or 16.
template <int kWidth, int kHeads>
class CodeSummer {
 public:
  static constexpr int kFields = 8 / kWidth;
  static constexpr int kWordTiles = kSummedDims / (8 * kFields);
  static constexpr int kHalves = kHeads / 8;

  // part: of the codes. first_word: of the part's words, from where kSummedDims dimensions are
  // summed.
  __device__ CodeSummer(const AttendShape& shape, const UnitRequest& u, int part, int first_word)
      : shape_(shape),
        u_(u),
        words_(shape.tiling.value_words(part)),
        row_words_(shape.tiling.value_row_words()),
        first_word_(first_word),
        codes_at_(shape.tiling.value_code_offset_bytes() / 4 +
                  (part == 1 ? shape.tiling.value_words(0) : 0)),
        below_(part == 1 ? 2 : 0),
        middle_(part == 1 ? 0 : (1 << shape.tiling.value_bits) - 1),
        inverse_unit_(1 / ValueUnit(u)) {}

  __device__ void Add(const SpanPages& pages, int at, int64_t page) {
    const std::byte* const code_page = pages.codes[at];
    const auto* const words = reinterpret_cast<const uint32_t*>(code_page) + codes_at_;
    const auto* const factors =
        reinterpret_cast<const uint2*>(code_page + shape_.tiling.value_factor_offset_bytes());
    int32_t products[kWordTiles][kFields][4] = {};
    float inverse[kHalves];
    const uint32_t* levels[kHalves];
    int32_t weight_sum[kHalves] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int head = half * 8 + lane_ / 4;
      const bool present = head < shape_.group;
      inverse[half] = present ? CodeWeightInverse(pages.largest[at][head]) : 0.0f;
      levels[half] = reinterpret_cast<const uint32_t*>(
          u_.codes.levels + (page * shape_.group + (present ? head : 0)) * kPageTokenCount);
    }
#pragma unroll
    for (int tile = 0; tile < kCodeTilesPerPage; ++tile) {
      uint32_t low[kWordTiles], high[kWordTiles];  // words of rows lane % 4 and lane % 4 + 4
      const int row = tile * 8 + lane_ % 4;
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
        const int word = first_word_ + j * 8 + lane_ / 4;
        const bool present = word < words_;
        low[j] = present ? words[row * row_words_ + word] : 0;
        high[j] = present ? words[(row + 4) * row_words_ + word] : 0;
      }
      uint32_t a[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        a[half] = Weights(levels[half][row], factors[row], inverse[half]);
        a[2 + half] = Weights(levels[half][row + 4], factors[row + 4], inverse[half]);
        weight_sum[half] = __dp4a(static_cast<int>(a[half]), 0x01010101, weight_sum[half]);
        weight_sum[half] = __dp4a(static_cast<int>(a[2 + half]), 0x01010101, weight_sum[half]);
      }
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
        for (int p = 0; p < kFields; ++p) {
          constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
          MultiplyBytes(products[j][p], a, low[j] >> (kWidth * p) & kMask,
                        high[j] >> (kWidth * p) & kMask);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      weight_sum[half] += __shfl_xor_sync(kFullWarp, weight_sum[half], 1);
      weight_sum[half] += __shfl_xor_sync(kFullWarp, weight_sum[half], 2);
      const int head = half * 8 + lane_ / 4;
      const float unit =
          head < shape_.group ? CodeWeightUnit(pages.largest[at][head]) * 0.5f * inverse_unit_ : 0;
      const int32_t offset = middle_ * weight_sum[half];
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
        for (int p = 0; p < kFields; ++p) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int32_t twice = (products[j][p][2 * half + c] << (1 + below_)) - offset;
            sums_[j][p][half][c] = fmaf(static_cast<float>(twice), unit, sums_[j][p][half][c]);
          }
        }
      }
    }
  }

  // Adds the warp's sums to sums [kHeads][kHeadDimMax].
  __device__ void AddTo(float* sums) const {
#pragma unroll
    for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
      for (int p = 0; p < kFields; ++p) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int word = first_word_ + j * 8 + lane_ % 4 * 2 + c;
            if (word >= words_) continue;
            sums[(half * 8 + lane_ / 4) * kHeadDimMax + p * words_ + word] += sums_[j][p][half][c];
          }
        }
      }
    }
  }

 private:
  // The integer weights of a row's four tokens.
  __device__ static uint32_t Weights(uint32_t levels, uint2 factors, float inverse) {
    const float f[4] = {__uint_as_float(factors.x << 16), __uint_as_float(factors.x & 0xFFFF0000u),
                        __uint_as_float(factors.y << 16), __uint_as_float(factors.y & 0xFFFF0000u)};
    uint32_t packed = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      packed |= static_cast<uint32_t>(CodeWeight(LevelWeight(LevelOf(levels, o)) * f[o], inverse))
                << (8 * o);
    }
    return packed;
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const int words_;
  const int row_words_;
  const int first_word_;
  const int codes_at_;
  const int below_;
  const int middle_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
  float sums_[kWordTiles][kFields][kHalves][2] = {};
};

// Fills `pages`. All threads; ends with a barrier. Of pages whose codes are not summed, marks that
// in memory if `marks`.
__device__ inline void LoadSpan(const AttendShape& shape, const UnitRequest& u, int64_t first,
                                bool marks, SpanPages& pages) {
  const int64_t page_count = u.scored_page_end() - u.scored_page_begin();
  const int count = static_cast<int>(min(u.scored_page_end() - first, int64_t{kSpanPages}));
  if (threadIdx.x == 0) pages.count = count;
  for (int i = threadIdx.x; i < count; i += kSpanThreads) {
    pages.codes[i] = u.code_pages[first + i];
    PageWeights* const weights = u.codes.weights + (first + i) * shape.group;
    bool has_mass = false;
    for (int g = 0; g < shape.group; ++g) {
      const PageWeights of_head = weights[g];
      pages.sums[i][g] = of_head.sum;
      pages.largest[i][g] = of_head.largest;
      has_mass |= PageHasMass(of_head.sum, u.state->code_sum[g], page_count);
    }
    pages.has_mass[i] = has_mass;
    for (int g = 0; g < shape.group && marks && !has_mass; ++g) weights[g].largest = 0;
  }
  __syncthreads();
}

// Sums x^ c and x^ ||c||^2 over a span's pages, with c the pages' value centres, for kHeads heads.
// to: of head 0; heads are `stride` apart. memory: [kSpanThreads][2] floats. All threads.
template <int kHeads>
__device__ inline void SumCentres(const AttendShape& shape, const UnitRequest& u,
                                  const SpanPages& pages, float* memory, float* to,
                                  int64_t stride) {
  const int d = shape.head_dim;
  const int padded = (d + 31) / 32 * 32;
  const int slices = kSpanThreads / padded;
  const int i = static_cast<int>(threadIdx.x) % padded;
  const int slice = static_cast<int>(threadIdx.x) / padded;
  const float inverse_unit = 1 / ValueUnit(u);
  float sum[kHeads] = {}, square[kHeads] = {};
  if (i < d && slice < slices) {
#pragma unroll 4
    for (int page = slice; page < pages.count; page += slices) {
      const auto* centre = reinterpret_cast<const uint16_t*>(
          pages.codes[page] + shape.tiling.value_centre_offset_bytes());
      const float c = BFloat16ToFloat(centre[i]) * inverse_unit;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        if (g >= shape.group) break;
        const float product = pages.sums[page][g] * c;
        sum[g] += product;
        square[g] = fmaf(product, c, square[g]);
      }
    }
  }
  float* const squares = memory + kSpanThreads;
#pragma unroll
  for (int g = 0; g < kHeads; ++g) {
    if (g >= shape.group) break;
    const float of_warp = WarpSum(square[g]);
    __syncthreads();
    memory[threadIdx.x] = sum[g];
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < d) {
      float all = 0;
      for (int s = 0; s < slices; ++s) all += memory[s * padded + threadIdx.x];
      to[g * stride + threadIdx.x] = all;
    }
    if (threadIdx.x == 0) {
      float all = 0;
      for (int w = 0; w < kSpanParts; ++w) all += squares[w];
      to[g * stride + d] = all;
    }
  }
}

// Sums the codes of the pages that have mass, and all pages' centres. Grid (spans, units, runs of
// kSummedDims dimensions). part: of the codes.
template <int kWidth, int kHeads>
__global__ void __launch_bounds__(kSpanThreads, kHeads == 8 ? 2 : 1)
    SumCodesKernel(AttendShape shape, int part, const UnitRequest* units) {
  __shared__ SpanPages pages;
  __shared__ float sums[kHeads * kHeadDimMax];
  __shared__ UnitRequest u;
  using Summer = CodeSummer<kWidth, kHeads>;
  Begin(units + blockIdx.y, u);
  if (!u.coded() || u.state->strata == 0 || blockIdx.x >= u.spans()) return;
  const int64_t first = u.scored_page_begin() + int64_t{blockIdx.x} * kSpanPages;
  const bool is_first = blockIdx.z == 0 && part == 0;
  LoadSpan(shape, u, first, is_first, pages);
  const int d = shape.head_dim;
  const int64_t stride = SpanFloats(d, shape.tiling.value_parts());
  float* const to = u.codes.sums + int64_t{blockIdx.x} * shape.group * stride;
  if (is_first) SumCentres<kHeads>(shape, u, pages, sums, to, stride);
  const int first_word = static_cast<int>(blockIdx.z) * Summer::kWordTiles * 8;
  Summer summer(shape, u, part, first_word);
  const int warp = threadIdx.x / 32;
  for (int i = 0; i < kPartPages; ++i) {
    // Neighbouring pages have mass together, so warps take turns.
    const int at = i * kSpanParts + warp;
    if (at < pages.count && pages.has_mass[at]) summer.Add(pages, at, first + at);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * kHeadDimMax; i += kSpanThreads) sums[i] = 0;
  for (int w = 0; w < kSpanParts; ++w) {
    __syncthreads();
    if (warp == w) summer.AddTo(sums);
  }
  __syncthreads();
  const int words = shape.tiling.value_words(part);
  for (int i = threadIdx.x; i < shape.group * d; i += kSpanThreads) {
    const int word = i % d % words;
    if (word < first_word || word >= first_word + Summer::kWordTiles * 8) continue;
    const int g = i / d;
    to[g * stride + d + 4 + part * d + i % d] = sums[g * kHeadDimMax + i % d];
  }
}

}  // namespace spillway::cuda
