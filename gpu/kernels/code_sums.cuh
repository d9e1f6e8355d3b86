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
      float sums[4], largest[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        sums[h] = largest[h] = 0;
#pragma unroll
        for (int o = 0; o < 4; ++o) {
          const float weight = LevelWeight(LevelOf(levels[h], o));
          sums[h] += weight;
          largest[h] = fmaxf(largest[h], weight * factors[o]);
        }
      }
      const PageWeights weights = {
          ReduceByLane(sums, [](float a, float b) { return a + b; }),
          ReduceByLane(largest, [](float a, float b) { return fmaxf(a, b); })};
      const int head = quartet * 4 + lane_ / 8;
      if (lane_ % 8 == 0 && head < shape_.group) {
        u_.codes.weights[page * shape_.group + head] = weights;
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

  // Adds the page's tokens that count to the predictions, stratum by stratum.
  __device__ void Predict(int64_t page, const std::byte* codes, const OwnSlots& own,
                          const float (&factors)[4], int quartet, const uint32_t (&levels)[4]) {
    constexpr int kNone = INT32_MAX;
    const bool all = IsReference(page);
    int stratum[4];  // of tokens that count
    bool any = false;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      stratum[o] = Counts(own.stratum[o], all) ? own.stratum[o] : kNone;
      any |= stratum[o] != kNone;
    }
    if (!__any_sync(kFullWarp, any)) return;
    float of_value[4][4], of_centre[4][4];  // by octet and head
    float key_factors[4];
    LoadOwnFactors(codes + shape_.tiling.factor_offset_bytes(), lane_, key_factors);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const float factor_square = fminf(key_factors[o] * key_factors[o], kFactorSquareMax);
      const float in_units = factors[o] * inverse_unit_;
      const float value_square = in_units * in_units * square_of_factor_;
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        PredictedTerms terms = {0, 0};
        const uint8_t level = LevelOf(levels[h], o);
        if (stratum[o] != kNone && level != 0) {
          terms = PredictTerms(LevelWeight(level),
                               LogitVariance(factor_square, shrinkage_[quartet * 4 + h]),
                               value_square, distortion_);
        }
        of_value[o][h] = terms.of_value;
        of_centre[o][h] = terms.of_centre;
      }
    }
    for (int last = -1;;) {
      int own_next = kNone;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        if (stratum[o] > last) own_next = min(own_next, stratum[o]);
      }
      const int next = __reduce_min_sync(kFullWarp, own_next);
      if (next == kNone) break;
      float sums[8] = {};
      uint32_t count = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const bool member = stratum[o] == next;
        count += __popc(__ballot_sync(kFullWarp, member));
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          sums[h] += member ? of_value[o][h] : 0.0f;
          sums[4 + h] += member ? of_centre[o][h] : 0.0f;
        }
      }
      const float sum = ReduceByLane(sums, [](float a, float b) { return a + b; });
      const int at = lane_ / 4;  // among the sums
      const int head = quartet * 4 + at % 4;
      if (lane_ % 4 == 0 && head < shape_.group) {
        PredictedPart& part = predicted_[next * shape_.group + head];
        if (at < 4) {
          part.of_value += sum;
          part.count += count;
        } else {
          part.of_centre += sum;
        }
      }
      last = next;
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

// Where a warp has what it reads of a page: the codes of a run of dimensions, [32] rows; the
// factors [32] rows; the levels [G]. Rows and heads are padded, so that lanes read different banks.
template <int kWidth>
struct SummedPage {
  static constexpr int kFields = 8 / kWidth;
  static constexpr int kWordTiles = kSummedDims / (8 * kFields);
  static constexpr int kRunWords = kWordTiles * 8;
  static constexpr int kRowWords = kRunWords + 8;
  static constexpr int kHeadWords = 32 + 4;
  static constexpr int kRows = kPageTokenCount / 4;

  __host__ __device__ static int Words(int group) {
    return kRows * kRowWords + 2 * kRows + group * kHeadWords;
  }
  __device__ explicit SummedPage(uint32_t* memory)
      : codes(memory),
        factors(reinterpret_cast<uint2*>(memory + kRows * kRowWords)),
        levels(memory + kRows * kRowWords + 2 * kRows) {}

  uint32_t* codes;
  uint2* factors;
  uint32_t* levels;
};

template <int kBytes>
__device__ inline void CopyAhead(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from));
  }
}

// Sums the codes of a part of a span: one warp. kWidth: bits of a field. kHeads: 8 or 16.
template <int kWidth, int kHeads>
class CodeSummer {
 public:
  using Page = SummedPage<kWidth>;
  static constexpr int kFields = Page::kFields;
  static constexpr int kWordTiles = Page::kWordTiles;
  static constexpr int kHalves = kHeads / 8;
  static constexpr int kDepth = 2;

  // part: of the codes. first_word: of the part's words, from where kSummedDims dimensions are
  // summed. first_page: of the span. memory: kDepth pages of the warp, in shared memory.
  __device__ CodeSummer(const AttendShape& shape, const UnitRequest& u, const SpanPages& pages,
                        int64_t first_page, int part, int first_word, uint32_t* memory)
      : shape_(shape),
        u_(u),
        pages_(pages),
        first_page_(first_page),
        memory_(memory),
        words_(shape.tiling.value_words(part)),
        row_words_(shape.tiling.value_row_words()),
        first_word_(first_word),
        codes_at_(shape.tiling.value_code_offset_bytes() / 4 +
                  (part == 1 ? shape.tiling.value_words(0) : 0) + first_word),
        below_(part == 1 ? 2 : 0),
        middle_(part == 1 ? 0 : (1 << shape.tiling.value_bits) - 1),
        inverse_unit_(1 / ValueUnit(u)) {}

  // Starts to copy the warp's first page. Neighbouring pages have mass together, so warps take
  // turns.
  __device__ void Begin() {
    at_ = Next(static_cast<int>(threadIdx.x) / 32);
    Bring(at_, 0);
  }
  // Adds all of the warp's pages.
  __device__ void AddAll() {
    for (int stage = 0; at_ < pages_.count; stage ^= 1) {
      const int after = Next(at_ + kSpanParts);
      Bring(after, stage ^ 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncwarp();
      Add(at_, Page(memory_ + stage * Page::Words(shape_.group)));
      __syncwarp();
      at_ = after;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
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
  // The warp's next page with mass from `at` on; beyond the span if there is none.
  __device__ int Next(int at) const {
    while (at < pages_.count && !pages_.has_mass[at]) at += kSpanParts;
    return at;
  }

  // Starts to copy a page, if it is one of the span.
  __device__ void Bring(int at, int stage) {
    if (at < pages_.count) {
      const Page to(memory_ + stage * Page::Words(shape_.group));
      const std::byte* const page = pages_.codes[at];
      const auto* const codes = reinterpret_cast<const uint32_t*>(page) + codes_at_;
      const int words = min(Page::kRunWords, words_ - first_word_);
      if (row_words_ % 4 == 0 && words % 4 == 0 && codes_at_ % 4 == 0) {
        BringCodes<16>(to, codes, words);
      } else {
        BringCodes<8>(to, codes, words);
      }
      const std::byte* const factors = page + shape_.tiling.value_factor_offset_bytes();
      if (lane_ < 16) CopyAhead<16>(to.factors + 2 * lane_, factors + 16 * lane_);
      const uint8_t* const levels =
          u_.codes.levels + (first_page_ + at) * shape_.group * kPageTokenCount;
      for (int i = lane_; i < shape_.group * 8; i += 32) {
        CopyAhead<16>(to.levels + i / 8 * Page::kHeadWords + i % 8 * 4, levels + 16 * i);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kBytes>
  __device__ void BringCodes(const Page& to, const uint32_t* codes, int words) {
    constexpr int kChunkWords = kBytes / 4;
    constexpr int kChunks = Page::kRunWords / kChunkWords;  // of a row
#pragma unroll 4
    for (int i = lane_; i < Page::kRows * kChunks; i += 32) {
      const int row = i / kChunks;
      const int word = i % kChunks * kChunkWords;
      if (word >= words) continue;
      CopyAhead<kBytes>(to.codes + row * Page::kRowWords + word, codes + row * row_words_ + word);
    }
  }

  __device__ void Add(int at, const Page& page) {
    int32_t products[kWordTiles][kFields][4] = {};
    float inverse[kHalves];
    int32_t weight_sum[kHalves] = {};
    const uint32_t* levels[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int head = half * 8 + lane_ / 4;
      const bool present = head < shape_.group;
      inverse[half] = present ? CodeWeightInverse(pages_.largest[at][head]) : 0.0f;
      levels[half] = page.levels + (present ? head : 0) * Page::kHeadWords;
    }
#pragma unroll
    for (int tile = 0; tile < kCodeTilesPerPage; ++tile) {
      const int row = tile * 8 + lane_ % 4;
      uint32_t a[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        a[half] = Weights(levels[half][row], page.factors[row], inverse[half]);
        a[2 + half] = Weights(levels[half][row + 4], page.factors[row + 4], inverse[half]);
        weight_sum[half] = __dp4a(static_cast<int>(a[half]), 0x01010101, weight_sum[half]);
        weight_sum[half] = __dp4a(static_cast<int>(a[2 + half]), 0x01010101, weight_sum[half]);
      }
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
        // What is beyond the part's words is not stored.
        const uint32_t* const words = page.codes + row * Page::kRowWords + j * 8 + lane_ / 4;
        const uint32_t low = words[0], high = words[4 * Page::kRowWords];
#pragma unroll
        for (int p = 0; p < kFields; ++p) {
          constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
          MultiplyBytes(products[j][p], a, low >> (kWidth * p) & kMask,
                        high >> (kWidth * p) & kMask);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      weight_sum[half] += __shfl_xor_sync(kFullWarp, weight_sum[half], 1);
      weight_sum[half] += __shfl_xor_sync(kFullWarp, weight_sum[half], 2);
      const int head = half * 8 + lane_ / 4;
      const float unit =
          head < shape_.group ? CodeWeightUnit(pages_.largest[at][head]) * 0.5f * inverse_unit_ : 0;
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
  const SpanPages& pages_;
  const int64_t first_page_;
  uint32_t* const memory_;
  const int words_;
  const int row_words_;
  const int first_word_;
  const int codes_at_;
  const int below_;
  const int middle_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
  int at_ = 0;  // the page that is added next
  float sums_[kWordTiles][kFields][kHalves][2] = {};
};

// Shared memory of SumCodesKernel.
template <int kWidth, int kHeads>
__host__ __device__ inline size_t SumBytes(int group) {
  return sizeof(uint32_t) * static_cast<size_t>(SummedPage<kWidth>::Words(group)) *
         CodeSummer<kWidth, kHeads>::kDepth * kSpanParts;
}

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
// kSummedDims dimensions). part: of the codes. Shared memory: SumBytes().
template <int kWidth, int kHeads>
__global__ void __launch_bounds__(kSpanThreads, kHeads == 8 ? 2 : 1)
    SumCodesKernel(AttendShape shape, int part, const UnitRequest* units) {
  extern __shared__ __align__(16) uint32_t sum_memory[];
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
  const int first_word = static_cast<int>(blockIdx.z) * Summer::Page::kRunWords;
  const int warp = threadIdx.x / 32;
  Summer summer(shape, u, pages, first, part, first_word,
                sum_memory + warp * Summer::kDepth * Summer::Page::Words(shape.group));
  summer.Begin();
  if (is_first) SumCentres<kHeads>(shape, u, pages, sums, to, stride);
  summer.AddAll();
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
    if (word < first_word || word >= first_word + Summer::Page::kRunWords) continue;
    const int g = i / d;
    to[g * stride + d + 4 + part * d + i % d] = sums[g * kHeadDimMax + i % d];
  }
}

}  // namespace spillway::cuda
