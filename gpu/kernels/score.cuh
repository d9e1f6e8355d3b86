#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "gpu/kernels/page_scores.cuh"
#include "host/core/score.h"

// Scores by estimated logits, and their histogram.
namespace spillway::cuda {

// Score bins of every token, the same bits as the CPU device's, and the
// unit's histogram. Grid (blocks, units); a warp takes a page. Shared memory:
// histogram [bin_count], query planes, a PageRing a warp.
// With kOneQuartet the group has at most four heads, and what is said of them
// stays in registers.
template <int kPlanes, int kFragments, bool kMass, bool kOneQuartet>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    ScoreAsymmetricKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ HeadTerms heads[kGroupMax];
  __shared__ UnitRequest u;
  LoadRequest(units + blockIdx.y, u);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  const int warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  const int page_bytes = shape.tiling.page_bytes();
  uint32_t* histogram = shared;
  uint2* planes = reinterpret_cast<uint2*>(shared + kScoreBinCount);
  const int quartets = (shape.group + 3) / 4;
  PageRing ring(reinterpret_cast<std::byte*>(planes + quartets * kFragments * 32) +
                    threadIdx.x / 32 * PageRing::kDepth * page_bytes,
                page_bytes);
  int64_t page_index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  // Addresses of pages are known two pages ahead, the pages come one ahead.
  // Codes were there before the attend: the first ones need not wait.
  const auto address = [&](int64_t p) { return p < page_count ? u.code_pages[p] : nullptr; };
  ring.Bring(address(page_index), lane);
  const std::byte* next = address(page_index + step);
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  GridDependencyWait();
  TriggerDependents();
  if (static_cast<int64_t>(blockIdx.x) * warps >= page_count) return;
  LoadQueryPlanes(u, quartets, shape.tiling.words, kFragments, planes);
  if (threadIdx.x < kGroupMax) {
    HeadTerms terms = {0, 0, 0, 0};  // of a head that is not there
    if (threadIdx.x < shape.group) {
      const UnitState& state = *u.state;
      terms = {state.offset[threadIdx.x], state.coefficient[threadIdx.x],
               FromOrderedBits(state.reference[threadIdx.x]),
               ScoreHeadWeight(state.mass[threadIdx.x])};
    }
    heads[threadIdx.x] = terms;
  }
  __syncthreads();

  // Tiles that are scored side by side.
  constexpr int kAhead = kPlanes * kFragments <= 2 ? 2 : 1;
  const HeadTerms first_terms = heads[lane % 4];
  float first_weights[4];
#pragma unroll
  for (int h = 0; h < 4; ++h) first_weights[h] = heads[h].weight;
  const QueryBits<kFragments> first_query(planes, lane);
  for (; page_index < page_count; page_index += step) {
    ring.Bring(next, lane);
    next = address(page_index + 2 * step);
    const std::byte* page = ring.Take();
    const PageSlots slots(u, page_index);
#pragma unroll 1
    for (int first = 0; first < kCodeTilesPerPage; first += kAhead) {
      uint4 codes[kAhead][kPlanes][kFragments];
      float factors[kAhead][4];
      int32_t ones[kAhead][4];
      float scores[kAhead] = {};
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
        TileOnes(codes[a], ones[a]);
      }
      // Adds a quartet's heads to the scores.
      const auto add_heads = [&](int quartet, const QueryBits<kFragments>& query,
                                 const HeadTerms& terms, const float(&weights)[4]) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          int32_t totals[4];
          TileTotals<kPlanes, kFragments>(codes[a], ones[a], query, terms.offset, totals);
          float e[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const float x = ScaledLogit(totals[t], terms.coefficient, factors[a][t]);
            e[t] = ScoreExp2(x - terms.reference);
          }
          ExchangeHeads(e, lane);
          // Heads that are not there weigh nothing, and their e is finite.
#pragma unroll
          for (int h = 0; h < 4; ++h) scores[a] = fmaf(e[h], weights[h], scores[a]);
          if (!kMass) continue;
          const int64_t token =
              page_index * kPageTokenCount + (first + a) * kCodeTileTokens + TokenOfLane(lane);
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            if (quartet * 4 + h >= shape.group || token >= u.n) continue;
            u.head_bins[(quartet * 4 + h) * u.n + token] =
                static_cast<uint16_t>(__float_as_uint(e[h]) >> kScoreBinShift);
          }
        }
      };
      if (kOneQuartet) {
        add_heads(0, first_query, first_terms, first_weights);
      } else {
#pragma unroll 1
        for (int quartet = 0; quartet < quartets; ++quartet) {
          const HeadTerms* of_quartet = heads + quartet * 4;
          const float weights[4] = {of_quartet[0].weight, of_quartet[1].weight,
                                    of_quartet[2].weight, of_quartet[3].weight};
          add_heads(quartet, QueryBits<kFragments>(planes + quartet * kFragments * 32, lane),
                    of_quartet[lane % 4], weights);
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        slots.Store((first + a) * kCodeTileTokens + TokenOfLane(lane),
                    __float_as_uint(scores[a]) >> kScoreBinShift, histogram);
      }
    }
    __syncwarp();  // before the next page takes this one's place
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

}  // namespace spillway::cuda
