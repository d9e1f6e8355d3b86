#pragma once

#include "gpu/kernels/binary_product.cuh"
#include "host/core/score.h"

// What scores are relative to: over a sample of pages each head's largest
// estimated logit and its softmax mass.
namespace spillway::cuda {

// Estimated logits of the sampled pages and their largest; see ReferencePages.
// A warp takes 32 tokens; grid (blocks, units). Shared memory: query planes.
template <int kPlanes, int kChunks>
__global__ void ReferenceKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ uint2 planes[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  const int64_t groups = pages.count * kGroupsPerPage;
  const int warps = blockDim.x / 32;
  if (static_cast<int64_t>(blockIdx.x) * warps >= groups) return;
  const int tiles = (shape.group + 3) / 4;
  const int lane = threadIdx.x % 32;
  LoadQueryPlanes(u, tiles, shape.tiling.words, kChunks, planes);
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < groups;
       i += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t page_index = pages.page(i / kGroupsPerPage);
    const int group = static_cast<int>(i % kGroupsPerPage);
    const std::byte* page = u.code_pages[page_index];
    uint4 codes[kPlanes][kChunks];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        codes[p][c] = LoadCodes(shape.tiling, page, p, group, c, lane);
      }
    }
    float factors[4];
    LoadFactors(shape.tiling, page, group, lane, factors);
    int32_t ones[4];
    GroupOnes(codes, ones);
    for (int tile = 0; tile < tiles; ++tile) {
      const int head = tile * 4 + lane % 4;
      const bool present = head < shape.group;
      const int32_t offset = present ? state.offset[head] : 0;
      const float coefficient = present ? state.coefficient[head] : 0;
      int32_t totals[4];
      GroupTotals<kPlanes, kChunks>(
          codes, ones, QueryBits<kChunks>(planes + tile * kChunks * 32, lane), offset, totals);
      float max = -INFINITY;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float x = ScaledLogit(totals[t], coefficient, factors[t]);
        x = x < kScoreLogitMax ? x : kScoreLogitMax;
        x = x > -kScoreLogitMax ? x : -kScoreLogitMax;
        const int slot = group * kGroupTokenCount + t * 8 + lane / 4;
        const int64_t token = page_index * kPageTokenCount + slot;
        if (present) {
          u.sample_logits[head * u.sample_token_count + i / kGroupsPerPage * kPageTokenCount +
                          slot] = x;
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

// sum 2^(x - M) in fixed point over the sample: the same in every order. Grid
// (blocks, units, heads).
__global__ void ReferenceMassKernel(const UnitRequest* units) {
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
    sum += ScoreMass(u.sample_logits[h * u.sample_token_count + i], max);
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(&state.mass[h], sum);
}

}  // namespace spillway::cuda
