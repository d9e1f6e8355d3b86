#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "host/base/limits.h"
#include "host/core/degrees.h"
#include "host/core/page_index.h"
#include "host/core/page_score.h"
#include "host/core/rank_error.h"
#include "host/core/sample_limit.h"
#include "host/core/softmax_sums.h"
#include "host/cpu/code_layout.h"
#include "host/model/model_spec.h"

// Entry points of the SIMD kernels. Each uses the best instruction set of the machine (Highway's
// dynamic dispatch). Kernels own no memory and do not allocate. Buffers are 64-byte aligned where
// they say so.
namespace spillway {

// The queries of one KV head, prepared for RowLogits().
struct RowQueries {
  int head_count = 0;
  int head_dim = 0;
  float scale = 1;                // softmax scale
  const float* scaled = nullptr;  // [head][d] q * scale
  // [head][d] q itself if every element is a bf16 number, else null. With it, products with bf16
  // keys are exact, and a lane takes two at a time.
  const uint16_t* bf16 = nullptr;
};

// ---- codes -------------------------------------------------------------

// Signs of host/core/value_code.h: +1 or -1, by transform and entry.
struct HadamardSigns {
  float of[2][kHeadDimMax];

  static HadamardSigns Of(int dim);
};

struct EncodeParams {
  int head_dim = 0;
  int bits_per_dim = 0;
  CodeLayout layout;
  const float* rotation = nullptr;             // P [d][d], row-major
  const float* rotation_transposed = nullptr;  // P^T [d][d]
  const float* centre = nullptr;               // c [d]
  const HadamardSigns* signs = nullptr;        // for value codes
};

// Computes codes and factors of the 16 keys of a tile. keys: the first row of the tile; rows are
// row_bytes apart and begin with K. page: the code page. tile is in [0, 8).
void EncodeTile(const EncodeParams& params, DType dtype, const std::byte* keys, int64_t row_bytes,
                std::byte* page, int tile);
// RadiusOf() of `count` vectors [dim], which are row_bytes apart, about a centre [dim]. count is a
// multiple of 16.
void Distances(DType dtype, const std::byte* vectors, int64_t row_bytes, int count, int dim,
               const float* centre, float* distances);
// Stores the code of one token, [layout.dims] values in 0 .. 2^B - 1 (0 beyond the head's
// dimensions), at slot [0, 128) of its page.
void StoreCode(const CodeLayout& layout, const uint8_t* codes, std::byte* page, int slot);
// y = P x, [d]. Each y_j is one chain of fused multiply-adds over i, as in the encoder.
void Rotate(const EncodeParams& params, const float* x, float* y);

// Writes the value codes and value factors of the 16 values of a tile. values: V of the tile's
// first row; rows are row_bytes apart. centre: the page's value centre [dim], bf16 numbers.
void EncodeValueTile(const CodeLayout& layout, const HadamardSigns& signs, DType dtype,
                     const std::byte* values, int64_t row_bytes, const float* centre,
                     std::byte* page, int tile);

// ---- scores ------------------------------------------------------------

// What a group's scores are relative to, for each query head: M_h and w_h of host/core/score.h.
struct ScoreReferences {
  float reference[kGroupMax] = {};
  float head_weight[kGroupMax] = {};
};

// A query group, prepared for scoring codes.
struct ScoreQuery {
  CodeLayout layout;
  int row_count = 0;  // rows of integer weights, one per query head
  // [row][layout.dims], |weight| <= 30, 0 beyond the head's dimensions.
  const int8_t* weights = nullptr;
  // [row] Added to the integer sum of the row.
  int32_t offset[kGroupMax] = {};
  float coefficient[kGroupMax] = {};  // log2(e) * scale * s * step / 4 per head
  ScoreReferences references;
};

// A page of codes, and the page that the scan reads next, which is prefetched; null: none.
struct ScanPage {
  const std::byte* codes;
  const std::byte* next = nullptr;
};

// q.c of a page's centre for each query of the group, [G][d] (host/core/page_score.h).
void CentreLogits(const float* queries, int group, int dim, float softmax_scale,
                  const std::byte* centre, float* centre_logits);
// The levels of x^ that a pass over scores writes.
struct LevelTarget {
  uint8_t* levels = nullptr;         // [G][kPageTokenCount] of a page; null: none are written
  const float* shrinkage = nullptr;  // [G] LevelShrinkage()
};
// Estimated logits of the 128 keys of a page, times log2(e): [G][128].
// centre_logits: [G].
void AsymmetricLogits(const ScoreQuery& query, const ScanPage& page, const float* centre_logits,
                      float* logits);
// Which keys of a page are summed up: 1, or 0 for strays and for tokens without a score.
struct PageMask {
  alignas(64) float of_slot[kPageTokenCount];
};
// Score bins of tiles [tile_begin, tile_end) of a page, both even, 16 per tile: the bits of the
// group score (host/core/score.h) >> kScoreBinShift. head_bins (null, or row_count pointers)
// receives the bins of each query head, for top-p. sums: [G], over these tiles.
void AsymmetricBins(const ScoreQuery& query, const ScanPage& page, const float* centre_logits,
                    const PageMask& mask, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins, const LevelTarget& levels, RankSums<float>* sums);
// Replaces `count` bins by WeighBin() of each; count is a multiple of 32.
void WeighBins(const uint8_t* norms, int raise, int count, uint16_t* bins);
// Bins of the same group scores, from logits [G][stride] in nats, exact or estimated. token_count
// is a multiple of 16; the caller ignores entries beyond its data.
void ExactBins(const ScoreReferences& references, const float* logits, int64_t stride,
               int head_count, int token_count, uint16_t* bins, uint16_t* const* head_bins);

// MaxLogit: the largest of `count` logits, but at least `least`. SumScoreMass: the sum of
// ScoreMass(x, max) over them.
float MaxLogit(const float* logits, int64_t count, float least);
uint64_t SumScoreMass(const float* logits, int64_t count, float max);

// Positions i of [0, count) with bins[i] >= least, written ascending to out
// (room for count). Returns how many.
int64_t FilterBins(const uint16_t* bins, int64_t count, uint16_t least, uint32_t* out);

// Limits on the places of the tokens that a sample may take, by bin.
struct SampleLimits {
  // Number of ranges of bins. Range e has the bins edge[e] <= bin < edge[e + 1]; edge[0] is 0.
  int count = 0;
  uint16_t edge[kTailStrataMax + 1];
  uint16_t limit[kTailStrataMax + 1];  // see PlaceLimit()

  uint16_t Of(uint16_t bin) const {
    return limit[std::upper_bound(edge, edge + count, bin) - edge - 1];
  }
};
// Positions i of [0, count) whose tokens, first_token + i, have places within the limit of bins[i];
// written ascending to out (room for count). Returns how many.
int64_t FilterTokens(const uint16_t* bins, uint32_t first_token, int64_t count,
                     const SampleOrder& order, const SampleLimits& limits, uint32_t* out);

// ---- value codes -------------------------------------------------------

// For one query head, over the tokens of a page: the sum of x^, in kRankChains chains, and the
// largest g x^. levels: [kPageTokenCount].
struct PageWeights {
  float sum;
  float largest;
};
PageWeights WeighPage(const uint8_t* levels, const std::byte* value_factors);
// CodeWeight() of each token of a page, [kPageTokenCount]; returns their sum.
int CodeWeights(const uint8_t* levels, const std::byte* value_factors, float largest,
                int8_t* weights);
// sums [head][dim] += the sum over the page's tokens of weight times u. weights:
// [head][kPageTokenCount].
void SumValueCodes(const CodeLayout& layout, const std::byte* page, const int8_t* weights,
                   int head_count, int32_t* sums);
// sums [head][dim] += centre times the head's weight. centre: bf16 [dim], which is multiplied by
// inverse_unit first. Returns ||centre||^2.
float AddCentre(const std::byte* centre, int dim, float inverse_unit, const float* weights,
                int head_count, float* sums);
// sums [dim] += (2 products - offset) times unit.
void AddProducts(const int32_t* products, int dim, int32_t offset, float unit, float* sums);
// x = H^T x, [dim].
void UndoHadamard(const HadamardSigns& signs, int dim, float* x);
// H^T t of the token at slot [0, 128) of a page, [dim]. code has room for kHeadDimMax + 16.
void DecodeValue(const CodeLayout& layout, const HadamardSigns& signs, const std::byte* page,
                 int slot, float* code);

// What codes say about a block of rows. Values are in units of ValueSums.
struct ResidualRows {
  const uint8_t* levels;      // [head][kRowBlock]
  const float* code_weights;  // [head][kRowBlock] g x^, as rounded for the sums, in units of 2^M_h
  const float* references;    // [head] M_h
  const float* centres;       // [row][dim] value centres of the rows' pages
  const float* codes;         // [row][kHeadDimMax] DecodeValue()
};

// ---- rows --------------------------------------------------------------

inline constexpr int kRowBlock = 32;  // maximum rows of a kernel call

// Prefetches a row.
inline void PrefetchRow(const std::byte* row, int64_t row_bytes) {
  for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

// q . k * scale for `count` <= kRowBlock rows: logits [head][kRowBlock]. next: the rows of the next
// block, at least `count`, whose first half is prefetched; FoldRows() prefetches the rest. May be
// null. Returns false if a logit is not finite.
bool RowLogits(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
               const RowQueries& queries, float* logits);
// Where a fold adds its sums over values. v is the value times inverse_unit.
struct ValueSums {
  float inverse_unit = 1;      // a power of two
  float* value = nullptr;      // [head][d] sum x v
  float* value_sq = nullptr;   // [head][d] sum x^2 v; null: no moments
  float* projected = nullptr;  // [head][kProjectionEntries] sum x^2 y y^T, with moments
  // [d] +1 or -1: y_m is the sum of v_i signs[i] over i = m, m + kProjectionDims, ...
  const float* signs = nullptr;
};
// Folds rows into softmax sums: x_i = exp(logit_i - max). If the maximum grows, the earlier sums
// are rescaled. counts[head] <= count rows are taken for each head (null: all). Overwrites logits
// with x. sums: [head].
void FoldRows(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
              const int* counts, int head_count, int head_dim, float* logits, RowSums* sums,
              const ValueSums& values);

// Folds rows as FoldRows() does with moments, but of x v - x^ v^ in place of x v, and of x - x^ in
// place of x. values must have moments.
void FoldResiduals(DType dtype, const std::byte* const* rows, int count, int head_count,
                   int head_dim, const float* logits, const ResidualRows& residual, RowSums* sums,
                   const ValueSums& values);

}  // namespace spillway
