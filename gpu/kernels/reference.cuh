#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "gpu/kernels/centre_logits.cuh"
#include "host/core/page_score.h"
#include "host/core/score.h"

// What scores are relative to: each head's largest estimated logit and softmax mass, over the
// reference pages and the centres of all scored pages.
namespace spillway::cuda {

// Estimated logits of the reference pages (see ReferencePages), and the largest of each head. One
// warp per tile; grid (blocks, units). The first reference_blocks blocks do this; the others
// compute all pages' centre logits, for the scores. Shared memory: query planes.
template <int kPlanes, int kFragments>
__global__ void ReferenceKernel(AttendShape shape, int reference_blocks, const UnitRequest* units) {
  extern __shared__ uint2 planes[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const int warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  if (static_cast<int>(blockIdx.x) >= reference_blocks) {
    const int64_t block = blockIdx.x - reference_blocks;
    StoreCentreLogits<kFragments>(shape, u, block * warps + threadIdx.x / 32,
                                  int64_t{gridDim.x - reference_blocks} * warps);
    return;
  }
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t tiles = pages.count * kCodeTilesPerPage;
  if (static_cast<int64_t>(blockIdx.x) * warps >= tiles) return;
  const int quartets = (shape.group + 3) / 4;
  LoadQueryPlanes(u, quartets, shape.tiling.words, kFragments, planes);
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < tiles;
       i += static_cast<int64_t>(reference_blocks) * warps) {
    const int64_t page_index = pages.page(i / kCodeTilesPerPage);
    const int tile = static_cast<int>(i % kCodeTilesPerPage);
    const std::byte* page = u.code_pages[page_index];
    ChainCoordinates<kFragments> centre;
    centre.LoadCentre(shape.tiling, page, lane);
    uint4 codes[kPlanes][kFragments];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int c = 0; c < kFragments; ++c) {
        codes[p][c] = LoadCodes(shape.tiling, page, p, tile, c, lane);
      }
    }
    float factors[4];
    LoadFactors(shape.tiling, page, tile, lane, factors);
    const uint32_t norms = LoadNorms(shape.tiling, page, tile, lane);
    int32_t ones[4];
    TileOnes(codes, lane, ones);
    for (int quartet = 0; quartet < quartets; ++quartet) {
      const int head = quartet * 4 + lane % 4;
      const bool present = head < shape.group;
      const int32_t offset = present ? state.offset[head] : 0;
      const float coefficient = present ? state.coefficient[head] : 0;
      const float centre_logit = QuartetCentreLogit(shape, u.q, centre, quartet, lane);
      int32_t totals[4];
      TileTotals<kPlanes, kFragments>(
          codes, ones, QueryBits<kFragments>(planes + quartet * kFragments * 32, lane), offset,
          totals);
      float max = -INFINITY;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float x = EstimatedLogit(ScaledTotal(totals[t], coefficient), factors[t], centre_logit);
        x = x < kScoreLogitMax ? x : kScoreLogitMax;
        x = x > -kScoreLogitMax && !IsStrayNorm(norms, t) ? x : -kScoreLogitMax;
        const int slot = tile * kCodeTileTokens + t * 8 + lane / 4;
        const int64_t token = page_index * kPageTokenCount + slot;
        if (present) {
          u.reference_logits[head * u.reference_token_count +
                             i / kCodeTilesPerPage * kPageTokenCount + slot] = x;
          if (token >= u.begin && token < u.end) max = fmaxf(max, x);
        }
      }
      for (const int offset_bit : {4, 8, 16}) {
        max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset_bit));
      }
      if (present && lane < 4) atomicMax(&state.reference[head], OrderedBits(max));
    }
  }
}

// Each head's sum of 2^(x - M) over the reference pages and, with kCentres (`asymmetric`), all
// pages' centres. In fixed point, so every order gives the same sum. Grid (blocks, units, heads).
template <bool kCentres>
__global__ void ReferenceMassKernel(int group, const UnitRequest* units) {
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t count = pages.count * kPageTokenCount;
  if (static_cast<int64_t>(blockIdx.x) * blockDim.x >= count) return;
  const int h = blockIdx.z;
  const float max = FromOrderedBits(state.reference[h]);
  unsigned long long sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t token = pages.page(i / kPageTokenCount) * kPageTokenCount + i % kPageTokenCount;
    if (token < u.begin || token >= u.end) continue;
    sum += ScoreMass(u.reference_logits[h * u.reference_token_count + i], max);
  }
  if constexpr (kCentres) {
    // There are fewer pages than tokens above: no block returned too early.
    for (int64_t page =
             u.scored_page_begin() + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         page < u.scored_page_end(); page += static_cast<int64_t>(gridDim.x) * blockDim.x) {
      sum += CentreMass(u.centre_logits[page * group + h], max);
    }
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(&state.mass[h], sum);
}

}  // namespace spillway::cuda
