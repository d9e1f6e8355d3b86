#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "gpu/kernels/page_scores.cuh"
#include "host/core/page_score.h"
#include "host/core/rank_error.h"
#include "host/core/score.h"

// Computes scores from estimated logits, and their histogram.
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

// Computes the score bin of every token (same bits as on the CPU device), the unit's histogram,
// and the RankSums of each page. Grid (blocks, units); one warp per page. Shared memory: histogram
// [kScoreBinCount], query planes, and one PageRing per warp. kOneQuartet: the group has at most
// four heads, and their terms stay in registers. again: scores only units whose heads are weighted
// again, with the new weights.
template <int kPlanes, int kFragments, bool kMass, bool kOneQuartet>
__global__ void __launch_bounds__(kScoreThreads, 1)
    ScoreAsymmetricKernel(AttendShape shape, bool again, const UnitRequest* units) {
  constexpr int kQuartets = kOneQuartet ? 1 : kGroupMax / 4;
  // Aligned so that pages are copied to whole lines of shared memory.
  extern __shared__ __align__(128) uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  if (again) {
    GridDependencyWait();
    if (!u.state->reweighed) return;
  }
  const int64_t page_end = u.scored_page_end();
  const int warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  const int64_t first_page = u.scored_page_begin() + static_cast<int64_t>(blockIdx.x) * warps;
  const int page_bytes = ScoredBytes(shape.tiling);
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  const int quartets = (shape.group + 3) / 4;
  PageRing ring(reinterpret_cast<std::byte*>(planes + quartets * kFragments * 32) +
                    threadIdx.x / 32 * PageRing::kDepth * page_bytes,
                page_bytes);
  int64_t page_index = first_page + threadIdx.x / 32;
  // Of the kernels before this one, only the last may still run; in the first pass it computes the
  // references' masses. Only its results must be read after GridDependencyWait(): the codes and
  // everything else are complete. Addresses of pages are loaded one page before the pages are
  // copied.
  const auto address = [&](int64_t p) { return p < page_end ? u.code_pages[p] : nullptr; };
  const std::byte* next = address(page_index);
  for (int i = 0; i < PageRing::kDepth; ++i) {
    const std::byte* after = address(page_index + (i + 1) * step);
    ring.Bring(next, lane);
    next = after;
  }
  // What the centre adds to the logits of head lane % 4 of a quartet.
  const auto centre_logit = [&](int64_t p, int quartet) {
    const int head = quartet * 4 + lane % 4;
    return p < page_end && head < shape.group ? u.centre_logits[p * shape.group + head] : 0.0f;
  };
  float next_centre_logits[kQuartets];
#pragma unroll
  for (int q = 0; q < kQuartets; ++q) next_centre_logits[q] = centre_logit(page_index, q);
  const int usual_level = WarpUsualLevel(shape.tiling, u);
  LoadQueryPlanes(u, quartets, shape.tiling.words, kFragments, planes);
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  GridDependencyWait();
  TriggerDependents();
  MarkUnscoredPages(u);
  if (first_page >= page_end) return;
  if (threadIdx.x < kGroupMax) {
    HeadTerms terms = {0, 0, 0, 0};  // for a head beyond the group
    if (threadIdx.x < shape.group) {
      const UnitState& state = *u.state;
      terms = {state.offset[threadIdx.x], state.coefficient[threadIdx.x],
               FromOrderedBits(state.reference[threadIdx.x]),
               again ? state.head_weight[threadIdx.x] : ScoreHeadWeight(state.mass[threadIdx.x])};
    }
    heads[threadIdx.x] = terms;
  }
  __syncthreads();

  // Tiles that are scored side by side.
  constexpr int kAhead = kPlanes * kFragments <= (kOneQuartet ? 4 : 2) ? 2 : 1;
  const HeadTerms first_terms = heads[lane % 4];
  float first_weights[4];
#pragma unroll
  for (int h = 0; h < 4; ++h) first_weights[h] = heads[h].weight;
  const QueryBits<kFragments> first_query(planes, lane);
  for (; page_index < page_end; page_index += step) {
    const std::byte* page = ring.Take();
    const PageSlots slots(u, page_index);
    float centre_logits[kQuartets];
    RankChains chains[kQuartets];
#pragma unroll
    for (int q = 0; q < kQuartets; ++q) {
      centre_logits[q] = next_centre_logits[q];
      next_centre_logits[q] = centre_logit(page_index + step, q);
      chains[q] = {};
    }
    const auto* norms = reinterpret_cast<const uint8_t*>(page) + shape.tiling.norm_offset_bytes();
    const int raise = RaiseOf(WarpLevel(shape.tiling, page), usual_level);
    // Whether every token counts in the page's sums.
    const bool whole =
        slots.begin == 0 && slots.end == kPageTokenCount &&
        __all_sync(kFullWarp, !HasStrayNorm(reinterpret_cast<const uint32_t*>(norms)[lane]));
#pragma unroll 1
    for (int first = 0; first < kCodeTilesPerPage; first += kAhead) {
      uint4 codes[kAhead][kPlanes][kFragments];
      float factors[kAhead][4];
      float squares[kAhead][4];
      int32_t ones[kAhead][4];
      float scores[kAhead] = {};
      uint8_t norm[kAhead];  // of the lane's token
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
          for (int c = 0; c < kFragments; ++c) {
            codes[a][p][c] = LoadCodes(shape.tiling, page, p, first + a, c, lane);
          }
        }
        LoadFactors(shape.tiling, page, first + a, lane, factors[a]);
        norm[a] = norms[(first + a) * kCodeTileTokens + lane];
        TileOnes(codes[a], lane, ones[a]);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          squares[a][t] = fminf(factors[a][t] * factors[a][t], kFactorSquareMax);
        }
      }
      // Adds a quartet's heads to the scores and to the page's sums.
      const auto add_heads = [&](int quartet, const QueryBits<kFragments>& query,
                                 const HeadTerms& terms, const float(&weights)[4]) {
        const float shift = centre_logits[quartet] - terms.reference;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          int32_t totals[4];
          TileTotals<kPlanes, kFragments>(codes[a], ones[a], query, terms.offset, totals);
          float e[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            e[t] = ScoreExp2(
                EstimatedLogit(ScaledTotal(totals[t], terms.coefficient), factors[a][t], shift));
          }
          if (whole) {
#pragma unroll
            for (int t = 0; t < 4; ++t) chains[quartet].Add(t, e[t], squares[a][t]);
          } else {
            const uint32_t own_norms = LoadNorms(shape.tiling, page, first + a, lane);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
              const int slot = (first + a) * kCodeTileTokens + t * 8 + lane / 4;
              const bool counted = slots.Scored(slot) && !IsStrayNorm(own_norms, t);
              chains[quartet].Add(t, counted ? e[t] : 0.0f, squares[a][t]);
            }
          }
          ExchangeHeads(e, lane);
          // Heads beyond the group have weight 0, and their e is finite.
#pragma unroll
          for (int h = 0; h < 4; ++h) scores[a] = fmaf(e[h], weights[h], scores[a]);
          if (!kMass) continue;
          const int64_t token =
              page_index * kPageTokenCount + (first + a) * kCodeTileTokens + TokenOfLane(lane);
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            if (quartet * 4 + h >= shape.group || token >= u.n) continue;
            u.head_bins[(quartet * 4 + h) * u.n + token] =
                norm[a] == kStrayNorm
                    ? kNotFoundBin
                    : static_cast<uint16_t>(__float_as_uint(e[h]) >> kScoreBinShift);
          }
        }
      };
      if (kOneQuartet) {
        add_heads(0, first_query, first_terms, first_weights);
      } else {
#pragma unroll
        for (int quartet = 0; quartet < kQuartets; ++quartet) {
          if (quartet >= quartets) break;
          const HeadTerms* of_quartet = heads + quartet * 4;
          const float weights[4] = {of_quartet[0].weight, of_quartet[1].weight,
                                    of_quartet[2].weight, of_quartet[3].weight};
          add_heads(quartet, QueryBits<kFragments>(planes + quartet * kFragments * 32, lane),
                    of_quartet[lane % 4], weights);
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int bin = static_cast<int>(__float_as_uint(scores[a]) >> kScoreBinShift);
        slots.Store((first + a) * kCodeTileTokens + TokenOfLane(lane),
                    static_cast<uint32_t>(WeighBin(bin, norm[a], raise)), histogram);
      }
    }
#pragma unroll
    for (int q = 0; q < kQuartets; ++q) {
      if (q >= quartets) break;
      const RankSums<float> sums = chains[q].Sum();
      const int head = q * 4 + lane;
      if (lane < 4 && head < shape.group) u.rank_sums[page_index * shape.group + head] = sums;
    }
    __syncwarp();  // before the next copy overwrites this page
    ring.Bring(next, lane);
    next = address(page_index + (PageRing::kDepth + 1) * step);
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

}  // namespace spillway::cuda
