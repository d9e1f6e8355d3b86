#pragma once

#include "gpu/kernels/device_math.cuh"

// What a block knows of a span of a coded unit's pages.
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

}  // namespace spillway::cuda
