#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "gpu/kernels/page_scores.cuh"
#include "host/core/page_score.h"
#include "host/core/rank_error.h"
#include "host/core/score.h"
#include "host/core/value_code.h"

// Scores a page of codes: the bins of its tokens, and sums for the errors of ranks. One warp a
// page.
namespace spillway::cuda {

// For one query head, the sums over a lane's tokens of a page, by token % 16; Sum() makes RankSums
// of them. Even octets of a tile are one chain, odd octets another.
struct RankChains {
  float weight[2];
  float error[2];

  __device__ void Add(int octet, float e, float factor_square) {
    weight[octet % 2] += e;
    error[octet % 2] = fmaf(e, factor_square, error[octet % 2]);
  }
  // The sums over the warp, for head lane % 4. All lanes.
  __device__ RankSums<float> Sum() const {
    static_assert(kRankChains == 16);
    RankSums<float> sums = {weight[0] + weight[1], error[0] + error[1]};
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2) {
      sums.weight += __shfl_xor_sync(kFullWarp, sums.weight, apart);
      sums.error += __shfl_xor_sync(kFullWarp, sums.error, apart);
    }
    return sums;
  }
};

// Four query heads of a unit, as a lane needs them.
template <int kFragments>
struct Quartet {
  int index;
  QueryBits<kFragments> query;
  HeadTerms terms;  // of head lane % 4
  float weights[4];

  // heads: [kGroupMax]. planes: of all quartets. Both in shared memory.
  __device__ Quartet(int index, const HeadTerms* heads, const uint2* planes, int lane)
      : index(index),
        query(planes + index * kFragments * 32, lane),
        terms(heads[index * 4 + lane % 4]) {
#pragma unroll
    for (int h = 0; h < 4; ++h) weights[h] = heads[index * 4 + h].weight;
  }
};

// A page that a warp scores.
struct ScoredPage {
  const std::byte* codes;  // in shared memory
  const uint8_t* norms;
  int64_t index;
  PageSlots slots;
  int raise;   // of the tokens' bins
  bool whole;  // whether every token counts in the page's sums

  // All lanes.
  __device__ ScoredPage(const CodeTiling& tiling, const UnitRequest& u, const std::byte* codes,
                        int64_t index, int usual_level, int lane)
      : codes(codes),
        norms(reinterpret_cast<const uint8_t*>(codes) + tiling.norm_offset_bytes()),
        index(index),
        slots(u, index),
        raise(RaiseOf(WarpLevel(tiling, codes), usual_level)),
        whole(
            slots.begin == 0 && slots.end == kPageTokenCount &&
            __all_sync(kFullWarp, !HasStrayNorm(reinterpret_cast<const uint32_t*>(norms)[lane]))) {}
};

// kCount tiles of a page that a warp scores side by side, from tile `first` on. [4]: a lane's
// tokens of a tile, one of each octet.
template <int kPlanes, int kFragments, int kCount>
struct ScoredTiles {
  int first;
  uint4 codes[kCount][kPlanes][kFragments];
  float factors[kCount][4];
  float squares[kCount][4];  // of the factors
  int32_t ones[kCount][4];
  uint8_t norm[kCount];  // of token TokenOfLane()
  float scores[kCount];  // of token TokenOfLane(): the sum over the heads so far

  __device__ ScoredTiles(const CodeTiling& tiling, const ScoredPage& page, int first, int lane)
      : first(first) {
#pragma unroll
    for (int a = 0; a < kCount; ++a) {
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
        for (int c = 0; c < kFragments; ++c) {
          codes[a][p][c] = LoadCodes(tiling, page.codes, p, first + a, c, lane);
        }
      }
      LoadFactors(tiling, page.codes, first + a, lane, factors[a]);
      norm[a] = page.norms[(first + a) * kCodeTileTokens + lane];
      TileOnes(codes[a], lane, ones[a]);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        squares[a][t] = fminf(factors[a][t] * factors[a][t], kFactorSquareMax);
      }
      scores[a] = 0;
    }
  }

  // Sets x to logit - reference, in octaves, of the lane's tokens of tile first + a for query head
  // lane % 4. shift: what the page's centre adds to the logits, less the reference.
  __device__ void Logits(int a, const Quartet<kFragments>& quartet, float shift,
                         float (&x)[4]) const {
    int32_t totals[4];
    TileTotals<kPlanes, kFragments>(codes[a], ones[a], quartet.query, quartet.terms.offset, totals);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      x[t] =
          EstimatedLogit(ScaledTotal(totals[t], quartet.terms.coefficient), factors[a][t], shift);
    }
  }
};

// Scores the pages of a unit. kMass: also stores the bins of each query head. kOneQuartet: the
// group has at most four heads, and what is known of them stays in registers.
template <int kPlanes, int kFragments, bool kMass, bool kOneQuartet>
class PageScorer {
 public:
  static constexpr int kQuartets = kOneQuartet ? 1 : kGroupMax / 4;

  // What the centre of a page adds to the logits of query head lane % 4 of each quartet.
  struct CentreLogits {
    float of_quartet[kQuartets];
  };

  // heads: [kGroupMax]. planes: the query's. histogram: [kScoreBinCount]. All in shared memory.
  __device__ PageScorer(const AttendShape& shape, const UnitRequest& u, int usual_level,
                        const HeadTerms* heads, const uint2* planes, uint32_t* histogram)
      : shape_(shape),
        u_(u),
        usual_level_(usual_level),
        heads_(heads),
        planes_(planes),
        histogram_(histogram),
        lane_(KeptLane()),
        first_quartet_(0, heads, planes, lane_) {}

  // codes: a page's, in shared memory. All lanes.
  __device__ void Score(const std::byte* codes, int64_t page_index, const CentreLogits& centre) {
    const ScoredPage page(shape_.tiling, u_, codes, page_index, usual_level_, lane_);
    RankChains chains[kQuartets];
#pragma unroll
    for (int q = 0; q < kQuartets; ++q) chains[q] = {};
#pragma unroll 1
    for (int first = 0; first < kCodeTilesPerPage; first += kAhead) {
      Tiles tiles(shape_.tiling, page, first, lane_);
      if (kOneQuartet) {
        AddQuartet(page, first_quartet_, centre.of_quartet[0], tiles, chains[0]);
      } else {
#pragma unroll
        for (int q = 0; q < kQuartets; ++q) {
          if (q * 4 >= shape_.group) break;
          AddQuartet(page, {q, heads_, planes_, lane_}, centre.of_quartet[q], tiles, chains[q]);
        }
      }
      StoreBins(page, tiles);
    }
#pragma unroll
    for (int q = 0; q < kQuartets; ++q) {
      if (q * 4 >= shape_.group) break;
      const RankSums<float> sums = chains[q].Sum();
      const int head = q * 4 + lane_;
      if (lane_ < 4 && head < shape_.group) u_.rank_sums[page_index * shape_.group + head] = sums;
    }
  }

 private:
  // The lane, in a register. Otherwise it is computed from threadIdx for each tile.
  __device__ static int KeptLane() {
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  // Tiles that are scored side by side.
  static constexpr int kAhead = kPlanes * kFragments <= (kOneQuartet ? 4 : 2) ? 2 : 1;
  using Tiles = ScoredTiles<kPlanes, kFragments, kAhead>;

  // Adds a quartet's heads to the tiles' scores and to the page's sums.
  __device__ void AddQuartet(const ScoredPage& page, const Quartet<kFragments>& quartet,
                             float centre_logit, Tiles& tiles, RankChains& chains) {
    const float shift = centre_logit - quartet.terms.reference;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      float e[4];
      tiles.Logits(a, quartet, shift, e);
      if (u_.coded()) StoreLevels(page, tiles.first + a, quartet, e, tiles.squares[a]);
#pragma unroll
      for (float& x : e) x = ScoreExp2(x);
      AddToChains(page, tiles.first + a, e, tiles.squares[a], chains);
      ExchangeHeads(e, lane_);
      // Heads beyond the group have weight 0, and their e is finite.
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        tiles.scores[a] = fmaf(e[h], quartet.weights[h], tiles.scores[a]);
      }
      if (kMass) StoreHeadBins(page, tiles.first + a, quartet.index, tiles.norm[a], e);
    }
  }

  // x: logits of query head lane % 4, by the lane's tokens.
  __device__ void StoreLevels(const ScoredPage& page, int tile, const Quartet<kFragments>& quartet,
                              const float (&x)[4], const float (&squares)[4]) {
    const int head = quartet.index * 4 + lane_ % 4;
    if (head >= shape_.group) return;
    uint32_t counted = 0xFu;
    if (!page.whole) {
      const uint32_t own_norms = LoadNorms(shape_.tiling, page.codes, tile, lane_);
      counted = 0;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int slot = tile * kCodeTileTokens + t * 8 + lane_ / 4;
        if (page.slots.Scored(slot) && !IsStrayNorm(own_norms, t)) counted |= 1u << t;
      }
    }
    uint32_t levels = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t level = ValueLevel(x[t], squares[t], quartet.terms.shrinkage);
      if ((counted >> t & 1u) != 0) levels |= level << (8 * t);
    }
    auto* const to = reinterpret_cast<uint32_t*>(
        u_.codes.levels + (page.index * shape_.group + head) * kPageTokenCount);
    to[tile * (kCodeTileTokens / 4) + lane_ / 4] = levels;
  }

  // e: of query head lane % 4, by the lane's tokens.
  __device__ void AddToChains(const ScoredPage& page, int tile, const float (&e)[4],
                              const float (&squares)[4], RankChains& chains) {
    if (page.whole) {
#pragma unroll
      for (int t = 0; t < 4; ++t) chains.Add(t, e[t], squares[t]);
    } else {
      const uint32_t own_norms = LoadNorms(shape_.tiling, page.codes, tile, lane_);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int slot = tile * kCodeTileTokens + t * 8 + lane_ / 4;
        const bool counted = page.slots.Scored(slot) && !IsStrayNorm(own_norms, t);
        chains.Add(t, counted ? e[t] : 0.0f, squares[t]);
      }
    }
  }

  // e: of token TokenOfLane(), by query head.
  __device__ void StoreHeadBins(const ScoredPage& page, int tile, int quartet, uint8_t norm,
                                const float (&e)[4]) {
    const int64_t token =
        page.index * kPageTokenCount + tile * kCodeTileTokens + TokenOfLane(lane_);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (quartet * 4 + h >= shape_.group || token >= u_.n) continue;
      u_.head_bins[(quartet * 4 + h) * u_.n + token] =
          norm == kStrayNorm ? kNotFoundBin
                             : static_cast<uint16_t>(__float_as_uint(e[h]) >> kScoreBinShift);
    }
  }

  __device__ void StoreBins(const ScoredPage& page, const Tiles& tiles) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int bin = static_cast<int>(__float_as_uint(tiles.scores[a]) >> kScoreBinShift);
      page.slots.Store((tiles.first + a) * kCodeTileTokens + TokenOfLane(lane_),
                       static_cast<uint32_t>(WeighBin(bin, tiles.norm[a], page.raise)), histogram_);
    }
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const int usual_level_;
  const HeadTerms* const heads_;
  const uint2* const planes_;
  uint32_t* const histogram_;
  const int lane_;
  const Quartet<kFragments> first_quartet_;
};

}  // namespace spillway::cuda
