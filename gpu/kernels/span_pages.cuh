#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/value_code.h"

// What a block knows of a span of a coded unit's pages, and how it comes to shared memory.
namespace spillway::cuda {

inline constexpr int kSpanThreads = 32 * kSpanParts;
// Pages that a warp weighs: page i of the span is that of warp i % kSpanParts.
inline constexpr int kWeighedPages = kSpanPages / kSpanParts;
// Rows of four tokens: those of a row of a tile. A lane has one of them.
inline constexpr int kPageRows = kPageTokenCount / 4;
static_assert(kPageRows == 32 && kSpanPages == 32);
// Words of a head's weights of a page, padded so that lanes read different banks.
inline constexpr int kWeightWords = kPageRows + 4;
// Dimensions whose codes a block sums at a time.
inline constexpr int kSummedDims = 128;
// Words of a row of codes that have them, at most; words of a page's codes on their way.
inline constexpr int kRunWordsMax = kSummedDims * 2 / 8;
inline constexpr int kStageWords = kPageRows * kRunWordsMax;

// What a warp needs to weigh its pages, in the second of its two stages. Factors as in the page, by
// CodeTiling::factor_index().
struct WeighedPages {
  uint16_t bins[kWeighedPages][kPageTokenCount];
  uint16_t value_factors[kWeighedPages][kPageTokenCount];
  uint16_t key_factors[kWeighedPages][kPageTokenCount];
  // Tokens that count in predictions: CountedToken.
  uint16_t counted[kWeighedPages * kPageTokenCount];
};
static_assert(sizeof(WeighedPages) == 4 * kStageWords);

// Shared memory of a block, in bytes from its beginning:
//   weights    uint32 [kSpanPages][G][kWeightWords], first the levels of x^, then integer weights
//   stages     uint32 [kSpanParts][2][kStageWords], of a warp: codes of pages on their way, before
//              them WeighedPages; later the warps' sums [kSpanParts][G][kSummedDims]
//   classes    [ClassBytes()]
//   predicted  float [kSpanParts][2][kStrataMax][G]; later the centres' sums
struct SpanLayout {
  int weights, stages, classes, predicted, end;

  __host__ __device__ explicit SpanLayout(const AttendShape& shape) {
    weights = 0;
    stages = weights + 4 * kSpanPages * shape.group * kWeightWords;
    classes = stages + 4 * kSpanParts * 2 * kStageWords;
    predicted = classes + ClassBytes(shape.bin_count);
    const int of_strata = 4 * kSpanParts * 2 * kStrataMax * shape.group;
    const int of_centres = 4 * (kSpanThreads * shape.group + kSpanParts * kGroupMax);
    end = predicted + (of_strata > of_centres ? of_strata : of_centres);
  }
};

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

// Which pages a span has: page i of it is page first + i * step. Pages with mass, and those with
// tokens that count in predictions, are near each other: so a span has every step-th page.
struct SpanPlace {
  int64_t first;
  int64_t step;
  int count;

  __device__ static SpanPlace Of(const UnitRequest& u, int span) {
    const int64_t pages = u.scored_page_end() - u.scored_page_begin();
    const int64_t step = u.spans();
    return {u.scored_page_begin() + span, step,
            (static_cast<int>(pages - span) + static_cast<int>(step) - 1) / static_cast<int>(step)};
  }
  __device__ int64_t page(int i) const { return first + i * step; }
};

// What a block knows of its pages; in shared memory.
struct SpanPages {
  SpanPlace place;
  uint32_t with_mass[kSpanParts];  // by warp, one bit a page; their union has mass
  uint32_t counted[kStrataMax];    // tokens that count in predictions
  const std::byte* codes[kSpanPages];
  float shrinkage[kGroupMax];                  // LevelShrinkage()
  float weight_of_level[kLevelMax + 1];        // LevelWeight()
  float sums[kSpanPages][kGroupMax];           // of x^
  float largest[kSpanPages][kGroupMax];        // of g x^; 0: the page's codes are not summed
  int32_t weight_sums[kSpanPages][kGroupMax];  // of the integer weights

  // One bit for each page that has mass.
  __device__ uint32_t MassMask() const {
    uint32_t mask = 0;
#pragma unroll
    for (int warp = 0; warp < kSpanParts; ++warp) mask |= with_mass[warp];
    return mask;
  }
};

// Copies what a span's pages are weighed by, and finds those that have mass. The copies are under
// way when it returns; they are a group of their own. All threads; ends with a barrier.
class SpanLoader {
 public:
  __device__ SpanLoader(const AttendShape& shape, const UnitRequest& u, const SpanPlace& place)
      : shape_(shape), u_(u), place_(place) {}

  __device__ void Load(std::byte* memory, const SpanLayout& at, SpanPages& pages,
                       TailBins& tail) const {
    LoadClasses(memory + at.classes);
    auto* const weights = reinterpret_cast<uint32_t*>(memory + at.weights);
    auto* const stages = reinterpret_cast<uint32_t*>(memory + at.stages);
    WeighedPages& weighed =
        *reinterpret_cast<WeighedPages*>(stages + (warp_ * 2 + 1) * kStageWords);
    const std::byte* codes = nullptr;
    if (lane_ < kWeighedPages && PageOf(lane_) < place_.count) {
      codes = u_.code_pages[place_.page(PageOf(lane_))];
      pages.codes[PageOf(lane_)] = codes;
    }
    static_assert(kSpanThreads == kLevelMax + 1);
    pages.weight_of_level[threadIdx.x] = LevelWeight(static_cast<uint8_t>(threadIdx.x));
    LoadOfUnit(memory + at.classes, pages, tail);
    FindMass(pages);
#pragma unroll 1
    for (int j = 0; j < kWeighedPages && PageOf(j) < place_.count; ++j) {
      const auto of_page = __shfl_sync(kFullWarp, reinterpret_cast<uintptr_t>(codes), j);
      LoadPage(j, weights, weighed, reinterpret_cast<const std::byte*>(of_page));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    __syncthreads();
  }

 private:
  __device__ int PageOf(int j) const { return warp_ + j * kSpanParts; }

  __device__ void LoadClasses(std::byte* to) const {
    const int bytes = ClassBytes(shape_.bin_count);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kSpanThreads * 16) {
      CopyAhead<16>(to + i, u_.class_of_bin + i);
    }
  }

  // Bins, levels and factors of page j of the warp.
  __device__ void LoadPage(int j, uint32_t* weights, WeighedPages& weighed,
                           const std::byte* codes) const {
    const int at = PageOf(j);
    const int64_t page = place_.page(at);
    constexpr int kChunks = kPageTokenCount * 2 / 16;
    static_assert(kChunks == 16);
    const int chunk = lane_ % kChunks * 8;  // in elements
    if (lane_ < kChunks) {
      CopyAhead<16>(weighed.bins[j] + chunk, u_.bins + page * kPageTokenCount + chunk);
      PrefetchCentre(codes);
    } else {
      const auto* const keys =
          reinterpret_cast<const uint16_t*>(codes + shape_.tiling.factor_offset_bytes());
      CopyAhead<16>(weighed.key_factors[j] + chunk, keys + chunk);
      const auto* const values =
          reinterpret_cast<const uint16_t*>(codes + shape_.tiling.value_factor_offset_bytes());
      CopyAhead<16>(weighed.value_factors[j] + chunk, values + chunk);
    }
    const uint8_t* const levels = u_.codes.levels + page * shape_.group * kPageTokenCount;
#pragma unroll 1
    for (int i = lane_; i < shape_.group * 8; i += 32) {
      CopyAhead<16>(weights + (at * shape_.group + i / 8) * kWeightWords + i % 8 * 4,
                    levels + i * 16);
    }
  }
  // The centre is read once the page has been weighed.
  __device__ void PrefetchCentre(const std::byte* codes) const {
    const int line = lane_ * 128;
    if (line >= shape_.head_dim * 2) return;
    asm volatile(
        "prefetch.global.L2 [%0];" ::"l"(codes + shape_.tiling.value_centre_offset_bytes() + line));
  }

  // What the block needs of the unit; each of it is loaded by other threads.
  __device__ void LoadOfUnit(const std::byte* classes, SpanPages& pages, TailBins& tail) const {
    const UnitState& state = *u_.state;
    if (warp_ == 0) {
      const bool near = lane_ < state.strata && state.stratum_count[lane_] <= kNearStratumTokens;
      static_assert(kStrataMax == 32);
      const int count = __ffs(static_cast<int>(~__ballot_sync(kFullWarp, near))) - 1;
      if (lane_ == 0) {
        pages.place = place_;
        tail = {reinterpret_cast<const uint8_t*>(classes), shape_.bin_count, state.tie_class,
                state.heavy_from, count < 0 ? kStrataMax : count};
      }
    } else if (warp_ == 1) {
      if (lane_ < shape_.group) {
        pages.shrinkage[lane_] = LevelShrinkage(state.rank_error_scale[lane_]);
      }
      pages.counted[lane_] = 0;
    }
  }

  // A lane has one of the span's pages, a warp every kSpanParts-th head.
  __device__ void FindMass(SpanPages& pages) const {
    const int64_t page_count = u_.scored_page_end() - u_.scored_page_begin();
    const int64_t page = place_.page(lane_);
    bool has_mass = false;
#pragma unroll 1
    for (int g = warp_; g < shape_.group; g += kSpanParts) {
      has_mass |= lane_ < place_.count && PageHasMass(u_.rank_sums[page * shape_.group + g].weight,
                                                      u_.state->score_sum[g], page_count);
    }
    const uint32_t mask = __ballot_sync(kFullWarp, has_mass);
    if (lane_ == 0) pages.with_mass[warp_] = mask;
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const SpanPlace place_;
  const int lane_ = threadIdx.x % 32;
  const int warp_ = threadIdx.x / 32;
};

}  // namespace spillway::cuda
