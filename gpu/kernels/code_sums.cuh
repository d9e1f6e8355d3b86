#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/rank_error.h"
#include "host/core/value_code.h"

// Of coded units: what codes give for the tail, and how far rows may be from it
// (host/core/value_code.h). One block per span of pages. Every sum is made in an order that depends
// on the unit alone.
namespace spillway::cuda {

inline constexpr int kSpanThreads = 32 * kSpanParts;
// Rows of four tokens: those of a row of a tile. A lane has one of them.
inline constexpr int kPageRows = kPageTokenCount / 4;
static_assert(kPageRows == 32);
// Words of a head's weights of a page, padded so that lanes read different banks.
inline constexpr int kWeightWords = kPageRows + 4;
// Dimensions whose codes a block sums at a time.
inline constexpr int kSummedDims = 128;
// Words of a row of codes that have them, at most.
inline constexpr int kRunWordsMax = kSummedDims * 2 / 8;

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

// Shared memory of a block, in bytes from its beginning:
//   weights    uint32 [kSpanPages][G][kWeightWords], integer weights of rows
//   codes      uint32 [kSpanParts][2][kPageRows][kRunWordsMax], of pages on their way
//   classes    [ClassBytes()], then predicted [kSpanParts][kStrataMax][G]; later the sums
//              [kSpanThreads + kSpanParts] of centres, and [8 or 16][kHeadDimMax] of codes
struct SpanLayout {
  int weights, codes, classes, predicted, end;

  __host__ __device__ explicit SpanLayout(const AttendShape& shape) {
    const int heads = shape.group <= 8 ? 8 : 16;
    weights = 0;
    codes = weights + 4 * kSpanPages * shape.group * kWeightWords;
    classes = codes + 4 * kSpanParts * 2 * kPageRows * kRunWordsMax;
    predicted = classes + ClassBytes(shape.bin_count);
    const int of_bins =
        predicted + static_cast<int>(sizeof(PredictedPart)) * kSpanParts * kStrataMax * shape.group;
    const int of_sums = classes + 4 * heads * kHeadDimMax;
    end = of_bins > of_sums ? of_bins : of_sums;
  }
};

// What a block knows of its pages; in shared memory. Page i of the span is page first + i * step.
// Pages with mass, and those with tokens that count in predictions, are near each other: so a span
// has every step-th page.
struct SpanPages {
  int64_t first;
  int64_t step;
  const std::byte* codes[kSpanPages];
  bool has_mass[kSpanPages];
  float sums[kSpanPages][kGroupMax];              // of x^
  float largest[kSpanPages][kGroupMax];           // of g x^; 0: the page's codes are not summed
  int32_t weight_sums[kSpanPages][kGroupMax];     // of the integer weights
  uint16_t counted[kSpanParts][kPageTokenCount];  // of a warp: tokens that count in predictions
  int count;
};

// Weighs the pages of a part of a span: one warp.
class PageWeigher {
 public:
  // shrinkage [G]: LevelShrinkage(). predicted [strata][G]: of the warp, zeros. weights: of the
  // span. All in shared memory.
  __device__ PageWeigher(const AttendShape& shape, const UnitRequest& u, const TailBins& tail,
                         const float* shrinkage, PredictedPart* predicted, uint32_t* weights,
                         SpanPages& pages)
      : shape_(shape),
        u_(u),
        tail_(tail),
        shrinkage_(shrinkage),
        predicted_(predicted),
        weights_(weights),
        pages_(pages),
        reference_(ReferencePages::Of(u.begin, u.end)),
        square_of_factor_(static_cast<float>(shape.head_dim) *
                          SquareOfFactor(shape.tiling.value_bits)),
        distortion_(static_cast<float>(QuantiserDistortion(shape.tiling.value_bits))),
        inverse_unit_(1 / ValueUnit(u)) {}

  // at: the page's place in the span.
  __device__ void Weigh(int64_t page, int at) {
    const std::byte* const codes = pages_.codes[at];
    const OwnSlots own(u_, tail_, page, lane_);
    const uint32_t mask = own.TailMask();
    float factors[4];
    LoadOwnFactors(codes + shape_.tiling.value_factor_offset_bytes(), lane_, factors);
    for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
      uint32_t levels[4];
      LoadLevels(page, quartet, mask, levels);
      WeighQuartet(page, at, quartet, levels, factors);
    }
    Predict(page, at, own);
  }

 private:
  // The levels of a quartet's heads, 0 for heads beyond the group. Those of tokens outside the tail
  // become 0, also in memory.
  __device__ void LoadLevels(int64_t page, int quartet, uint32_t mask, uint32_t (&levels)[4]) {
    auto* const at = reinterpret_cast<uint32_t*>(
        u_.codes.levels + (page * shape_.group + quartet * 4) * kPageTokenCount);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      levels[h] = quartet * 4 + h < shape_.group ? at[h * kPageRows + lane_] : 0;
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if ((levels[h] & ~mask) == 0) continue;
      levels[h] &= mask;
      at[h * kPageRows + lane_] = levels[h];
    }
  }

  // Sets sums, largest products and integer weights of a quartet's heads.
  __device__ void WeighQuartet(int64_t page, int at, int quartet, const uint32_t (&levels)[4],
                               const float (&factors)[4]) {
    const bool has_mass = pages_.has_mass[at];
    float products[4][4], sums[4], largest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      sums[h] = largest[h] = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const float weight = LevelWeight(LevelOf(levels[h], o));
        products[h][o] = weight * factors[o];
        sums[h] += weight;
        largest[h] = fmaxf(largest[h], products[h][o]);
      }
    }
    // Lane l gets those of head l / 8.
    const float sum = ReduceByLane(sums, [](float a, float b) { return a + b; });
    const float most =
        has_mass ? ReduceByLane(largest, [](float a, float b) { return fmaxf(a, b); }) : 0.0f;
    const int head = quartet * 4 + lane_ / 8;
    if (lane_ % 8 == 0 && head < shape_.group) {
      pages_.sums[at][head] = sum;
      pages_.largest[at][head] = most;
      u_.codes.largest[page * shape_.group + head] = most;
    }
    if (!has_mass) return;
    const float inverse_of_lane = CodeWeightInverse(most);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float inverse = __shfl_sync(kFullWarp, inverse_of_lane, 8 * h);
      if (quartet * 4 + h >= shape_.group) break;
      uint32_t packed = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        packed |= static_cast<uint32_t>(CodeWeight(products[h][o], inverse)) << (8 * o);
      }
      weights_[(at * shape_.group + quartet * 4 + h) * kWeightWords + lane_] = packed;
      const int own = __dp4a(static_cast<int>(packed), 0x01010101, 0);
      const int total = __reduce_add_sync(kFullWarp, own);
      if (lane_ == 0) pages_.weight_sums[at][quartet * 4 + h] = total;
    }
  }

  __device__ bool IsReference(int64_t page) const {
    const int64_t from = page - reference_.first;
    return from >= 0 && from % reference_.step == 0 && from / reference_.step < reference_.count;
  }

  // Adds the page's tokens that count to the predictions, one a lane, stratum by stratum.
  __device__ void Predict(int64_t page, int at, const OwnSlots& own) {
    const bool all = IsReference(page);
    uint16_t* const counted = pages_.counted[threadIdx.x / 32];
    const unsigned lower = (1u << lane_) - 1;
    int count = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int stratum = own.stratum[o];
      const bool counts = stratum >= 0 && (all || stratum < tail_.near);
      const unsigned found = __ballot_sync(kFullWarp, counts);
      if (counts) {
        counted[count + __popc(found & lower)] =
            static_cast<uint16_t>(4 * lane_ + o | stratum << 8);
      }
      count += __popc(found);
    }
    __syncwarp();
    for (int first = 0; first < count; first += 32) {
      const bool there = first + lane_ < count;
      const int packed = counted[min(first + lane_, count - 1)];
      PredictTokens(page, at, packed & 0xFF, there ? packed >> 8 : kNoStratum);
    }
    __syncwarp();  // before the list is written again
  }

  // index: of the lane's token among the page's factors.
  __device__ void PredictTokens(int64_t page, int at, int index, int stratum) {
    const std::byte* const codes = pages_.codes[at];
    const auto factor_at = [&](int offset) {
      return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(codes + offset)[index]);
    };
    const float key_factor = factor_at(shape_.tiling.factor_offset_bytes());
    const float factor_square = fminf(key_factor * key_factor, kFactorSquareMax);
    const float in_units = factor_at(shape_.tiling.value_factor_offset_bytes()) * inverse_unit_;
    const float value_square = in_units * in_units * square_of_factor_;
    const float distortion = pages_.has_mass[at] ? distortion_ : 1.0f;
    for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
      float of_value[4], of_centre[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int g = min(quartet * 4 + h, shape_.group - 1);
        const uint8_t level = u_.codes.levels[(page * shape_.group + g) * kPageTokenCount + index];
        PredictedTerms terms = {0, 0};
        if (level != 0) {
          terms = PredictTerms(LevelWeight(level), LogitVariance(factor_square, shrinkage_[g]),
                               value_square, distortion);
        }
        of_value[h] = terms.of_value;
        of_centre[h] = terms.of_centre;
      }
      AddTerms(quartet, stratum, of_value, of_centre);
    }
  }

  // Adds the lanes' terms to the warp's predictions.
  __device__ void AddTerms(int quartet, int stratum, const float (&of_value)[4],
                           const float (&of_centre)[4]) {
    for (int last = -1;;) {
      const int next = __reduce_min_sync(kFullWarp, stratum > last ? stratum : kNoStratum);
      if (next == kNoStratum) break;
      const bool member = stratum == next;
      const auto count = static_cast<uint32_t>(__popc(__ballot_sync(kFullWarp, member)));
      float sums[8];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        sums[h] = member ? of_value[h] : 0.0f;
        sums[4 + h] = member ? of_centre[h] : 0.0f;
      }
      const float sum = ReduceByLane(sums, [](float a, float b) { return a + b; });
      const int of_lane = lane_ / 4;  // among the sums
      const int head = quartet * 4 + of_lane % 4;
      if (lane_ % 4 == 0 && head < shape_.group) {
        PredictedPart& part = predicted_[next * shape_.group + head];
        if (of_lane < 4) {
          part.of_value += sum;
          part.count += count;
        } else {
          part.of_centre += sum;
        }
      }
      last = next;
    }
  }

  static constexpr int kNoStratum = INT32_MAX;

  const AttendShape& shape_;
  const UnitRequest& u_;
  const TailBins& tail_;
  const float* const shrinkage_;
  PredictedPart* const predicted_;
  uint32_t* const weights_;
  SpanPages& pages_;
  const ReferencePages reference_;
  const float square_of_factor_;
  const float distortion_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
};

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

// Sums the codes of a warp's pages over kSummedDims dimensions of a part. kWidth: bits of a field.
// kHeads: 8 or 16. Codes are the rows of a matrix, dimensions by tokens, and weights the columns of
// another, tokens by heads.
template <int kWidth, int kHeads>
class CodeSummer {
 public:
  static constexpr int kFields = 8 / kWidth;
  static constexpr int kRunWords = kSummedDims / kFields;
  static constexpr int kWordTiles = kRunWords / 16;
  static constexpr int kHeadTiles = kHeads / 8;

  // part: of the codes. first_word: of the part's words. weights: of the span. memory: of the warp.
  __device__ CodeSummer(const AttendShape& shape, const UnitRequest& u, const SpanPages& pages,
                        int part, int first_word, const uint32_t* weights, uint32_t* memory)
      : shape_(shape),
        pages_(pages),
        weights_(weights),
        memory_(memory),
        words_(shape.tiling.value_words(part)),
        row_words_(shape.tiling.value_row_words()),
        first_word_(first_word),
        codes_at_(shape.tiling.value_code_offset_bytes() / 4 +
                  (part == 1 ? shape.tiling.value_words(0) : 0) + first_word),
        below_(part == 1 ? 2 : 0),
        middle_(part == 1 ? 0 : (1 << shape.tiling.value_bits) - 1),
        inverse_unit_(1 / ValueUnit(u)) {}

  // Starts to copy the warp's first page with mass.
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
      Add(at_, memory_ + stage * kPageRows * kRunWordsMax);
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
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int word = first_word_ + j * 16 + e / 2 * 8 + lane_ / 4;
            const int head = n * 8 + lane_ % 4 * 2 + e % 2;
            if (word < words_) sums[head * kHeadDimMax + p * words_ + word] += sums_[j][p][n][e];
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

  // Where a word of a row is: rows that lanes read together are in other banks.
  __device__ static int WordAt(int row, int word) {
    return row * kRunWords + (word ^ (row * 8 & (kRunWords - 8)));
  }

  // Starts to copy a page, if it is one of the span.
  __device__ void Bring(int at, int stage) {
    if (at < pages_.count) {
      const auto* const codes = reinterpret_cast<const uint32_t*>(pages_.codes[at]) + codes_at_;
      const int words = min(kRunWords, words_ - first_word_);
      uint32_t* const to = memory_ + stage * kPageRows * kRunWordsMax;
      if (row_words_ % 4 == 0 && words % 4 == 0 && codes_at_ % 4 == 0) {
        BringRows<16>(to, codes, words);
      } else {
        BringRows<8>(to, codes, words);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kBytes>
  __device__ void BringRows(uint32_t* to, const uint32_t* codes, int words) {
    constexpr int kChunkWords = kBytes / 4;
    constexpr int kChunks = kRunWords / kChunkWords;  // of a row
#pragma unroll 4
    for (int i = lane_; i < kPageRows * kChunks; i += 32) {
      const int row = i / kChunks;
      const int word = i % kChunks * kChunkWords;
      if (word < words) CopyAhead<kBytes>(to + WordAt(row, word), codes + row * row_words_ + word);
    }
  }

  __device__ void Add(int at, const uint32_t* codes) {
    int32_t products[kWordTiles][kFields][kHeadTiles][4] = {};
    const int column = lane_ / 4;
    const uint32_t* const weights = weights_ + at * shape_.group * kWeightWords;
#pragma unroll
    for (int tile = 0; tile < kCodeTilesPerPage; ++tile) {
      const int row = tile * 8 + lane_ % 4;
      uint32_t b[kHeadTiles][2];
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        const int head = n * 8 + column;
        const bool present = head < shape_.group;
        b[n][0] = present ? weights[head * kWeightWords + row] : 0;
        b[n][1] = present ? weights[head * kWeightWords + row + 4] : 0;
      }
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
        // What is beyond the part's words is not stored.
        const int word = j * 16 + column;
        const uint32_t w[4] = {codes[WordAt(row, word)], codes[WordAt(row, word + 8)],
                               codes[WordAt(row + 4, word)], codes[WordAt(row + 4, word + 8)]};
#pragma unroll
        for (int p = 0; p < kFields; ++p) {
          constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
          const uint32_t a[4] = {w[0] >> (kWidth * p) & kMask, w[1] >> (kWidth * p) & kMask,
                                 w[2] >> (kWidth * p) & kMask, w[3] >> (kWidth * p) & kMask};
#pragma unroll
          for (int n = 0; n < kHeadTiles; ++n) {
            MultiplyBytes(products[j][p][n], a, b[n][0], b[n][1]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = n * 8 + lane_ % 4 * 2 + c;
        if (head >= shape_.group) continue;
        const float unit = CodeWeightUnit(pages_.largest[at][head]) * 0.5f * inverse_unit_;
        const int32_t offset = middle_ * pages_.weight_sums[at][head];
#pragma unroll
        for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
          for (int p = 0; p < kFields; ++p) {
#pragma unroll
            for (int e = c; e < 4; e += 2) {
              const int32_t twice = (products[j][p][n][e] << (1 + below_)) - offset;
              sums_[j][p][n][e] = fmaf(static_cast<float>(twice), unit, sums_[j][p][n][e]);
            }
          }
        }
      }
    }
  }

  const AttendShape& shape_;
  const SpanPages& pages_;
  const uint32_t* const weights_;
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
  float sums_[kWordTiles][kFields][kHeadTiles][4] = {};
};

// Fills what is known of a span before its pages are weighed. All threads; ends with a barrier.
__device__ inline void LoadSpan(const AttendShape& shape, const UnitRequest& u, int span,
                                SpanPages& pages) {
  const int64_t page_count = u.scored_page_end() - u.scored_page_begin();
  const int64_t step = u.spans();
  const int64_t first = u.scored_page_begin() + span;
  const int count = static_cast<int>((page_count - span + step - 1) / step);
  if (threadIdx.x == 0) {
    pages.first = first;
    pages.step = step;
    pages.count = count;
  }
  for (int i = threadIdx.x; i < count; i += kSpanThreads) {
    const int64_t page = first + i * step;
    pages.codes[i] = u.code_pages[page];
    bool has_mass = false;
    for (int g = 0; g < shape.group; ++g) {
      has_mass |= PageHasMass(u.rank_sums[page * shape.group + g].weight, u.state->score_sum[g],
                              page_count);
    }
    pages.has_mass[i] = has_mass;
  }
  __syncthreads();
}

// Sums x^, x^ c and x^ ||c||^2 over a span's pages, with c the pages' value centres. to: of head 0;
// heads are `stride` apart. memory: [kSpanThreads + kSpanParts] floats. All threads.
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
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      float all = 0;
      for (int w = 0; w < kSpanParts; ++w) all += squares[w];
      static_assert(kSpanPages == 32);
      const float of_pages = WarpSum(lane < pages.count ? pages.sums[lane][g] : 0.0f);
      if (lane == 0) {
        to[g * stride + d] = all;
        to[g * stride + d + 1] = of_pages;
      }
    }
  }
  __syncthreads();
}

// One pass over the codes of the pages that have mass: kSummedDims dimensions of a part. sums
// [kHeads][kHeadDimMax]: shared memory. between(): what may run while the first pages are on their
// way; it ends with a barrier. All threads.
template <int kWidth, int kHeads, typename Between>
__device__ inline void SumPart(const AttendShape& shape, const UnitRequest& u,
                               const SpanPages& pages, int part, int first_word,
                               const uint32_t* weights, uint32_t* codes, float* sums, float* to,
                               int64_t stride, Between between) {
  using Summer = CodeSummer<kWidth, kHeads>;
  const int warp = threadIdx.x / 32;
  Summer summer(shape, u, pages, part, first_word, weights,
                codes + warp * 2 * kPageRows * kRunWordsMax);
  summer.Begin();
  between();
  summer.AddAll();
  for (int i = threadIdx.x; i < kHeads * kHeadDimMax; i += kSpanThreads) sums[i] = 0;
  for (int w = 0; w < kSpanParts; ++w) {
    __syncthreads();
    if (warp == w) summer.AddTo(sums);
  }
  __syncthreads();
  const int d = shape.head_dim;
  const int words = shape.tiling.value_words(part);
  for (int i = threadIdx.x; i < shape.group * d; i += kSpanThreads) {
    const int word = i % d % words;
    if (word < first_word || word >= first_word + Summer::kRunWords) continue;
    const int g = i / d;
    to[g * stride + d + 4 + part * d + i % d] = sums[g * kHeadDimMax + i % d];
  }
  __syncthreads();
}

// Weighs the tail's tokens, predicts variances, and sums the codes of the pages that have mass and
// all pages' centres; sets to 0 the levels of tokens outside the tail. Grid (spans, units). Shared
// memory: SpanLayout.
template <int kHeads>
__global__ void __launch_bounds__(kSpanThreads, kHeads == 8 ? 2 : 1)
    SumCodesKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) std::byte span_memory[];
  __shared__ float shrinkage[kGroupMax];
  __shared__ TailBins tail;
  __shared__ SpanPages pages;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  const int strata = state.strata;
  if (!u.coded() || strata == 0 || blockIdx.x >= u.spans()) return;
  const SpanLayout at(shape);
  auto* const weights = reinterpret_cast<uint32_t*>(span_memory + at.weights);
  auto* const codes = reinterpret_cast<uint32_t*>(span_memory + at.codes);
  auto* const classes = reinterpret_cast<uint8_t*>(span_memory + at.classes);
  auto* const predicted = reinterpret_cast<PredictedPart*>(span_memory + at.predicted);
  auto* const sums = reinterpret_cast<float*>(span_memory + at.classes);
  const int width = strata * shape.group;
  for (int i = threadIdx.x; i < ClassBytes(shape.bin_count) / 16; i += kSpanThreads) {
    reinterpret_cast<uint4*>(classes)[i] = reinterpret_cast<const uint4*>(u.class_of_bin)[i];
  }
  for (int i = threadIdx.x; i < kSpanParts * width; i += kSpanThreads) predicted[i] = {0, 0, 0};
  if (static_cast<int>(threadIdx.x) < shape.group) {
    shrinkage[threadIdx.x] = LevelShrinkage(state.rank_error_scale[threadIdx.x]);
  }
  if (threadIdx.x == 0) {
    int near = 0;
    while (near < strata && state.stratum_count[near] <= kNearStratumTokens) ++near;
    tail = {classes, shape.bin_count, state.tie_class, state.heavy_from, near};
  }
  LoadSpan(shape, u, static_cast<int>(blockIdx.x), pages);
  const int d = shape.head_dim;
  const CodeTiling& tiling = shape.tiling;
  const int64_t stride = SpanFloats(d, tiling.value_parts());
  float* const to = u.codes.sums + int64_t{blockIdx.x} * shape.group * stride;
  const auto weigh = [&] {
    const int warp = threadIdx.x / 32;
    PageWeigher weigher(shape, u, tail, shrinkage, predicted + warp * width, weights, pages);
    for (int i = warp; i < pages.count; i += kSpanParts) {
      weigher.Weigh(pages.first + i * pages.step, i);
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
    __syncthreads();
    SumCentres<kHeads>(shape, u, pages, sums, to, stride);
  };
  bool weighed = false;
  for (int part = 0; part < tiling.value_parts(); ++part) {
    const int run_words = kSummedDims * tiling.value_width(part) / 8;
    for (int word = 0; word < tiling.value_words(part); word += run_words) {
      const auto between = [&] {
        if (!weighed) weigh();
        weighed = true;
      };
      if (tiling.value_width(part) == 2) {
        SumPart<2, kHeads>(shape, u, pages, part, word, weights, codes, sums, to, stride, between);
      } else {
        SumPart<1, kHeads>(shape, u, pages, part, word, weights, codes, sums, to, stride, between);
      }
    }
  }
}

}  // namespace spillway::cuda
