#pragma once

#include "gpu/kernels/rows.cuh"
#include "host/core/score.h"

// Scores from exact logits: every key is read where it lies. For evaluation.
namespace spillway::cuda {

// Logits of a page's first `count` rows, [G][kPageTokenCount] in shared
// memory; a logit that is not finite is remembered.
__device__ inline void ExactPageLogits(const AttendShape& shape, const UnitRequest& u,
                                       int64_t page_index, int count, const float* queries,
                                       float* tile, float* logits) {
  const int d = shape.head_dim;
  const int rows = TileRows(d);
  const std::byte* page = u.row_pages[page_index];
  for (int at = 0; at < count; at += rows) {
    const int m = min(rows, count - at);
    __syncthreads();
    LoadTile(
        shape.dtype, d, m, [&](int i) { return page + (at + i) * shape.row_bytes; }, tile);
    __syncthreads();
    for (int i = threadIdx.x; i < m * shape.group; i += blockDim.x) {
      const int row = i % m;
      const int head = i / m;
      const float l = Dot(tile + row * TileStride(d), queries + head * d, d);
      if (!isfinite(l)) {
        atomicMin(&u.state->error_token,
                  static_cast<uint32_t>(page_index * kPageTokenCount + at + row));
      }
      logits[head * kPageTokenCount + at + row] = l;
    }
  }
  __syncthreads();
}

// Shared memory of both kernels: queries [G][d], logits [G][128], tile.
__device__ inline void LoadScaledQueries(const AttendShape& shape, const UnitRequest& u,
                                         float* queries) {
  for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
    queries[i] = u.q[i] * shape.scale;
  }
}

// The sampled pages' logits and their largest. Grid (blocks, units).
__global__ void OracleReferenceKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  float* queries = memory;
  float* logits = queries + shape.group * shape.head_dim;
  float* tile = logits + shape.group * kPageTokenCount;
  LoadScaledQueries(shape, u, queries);
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  for (int64_t i = blockIdx.x; i < pages.count; i += gridDim.x) {
    const int64_t page_index = pages.first + pages.step * i;
    const int64_t first = page_index * kPageTokenCount;
    const int count = static_cast<int>(min(static_cast<int64_t>(kPageTokenCount), u.end - first));
    ExactPageLogits(shape, u, page_index, count, queries, tile, logits);
    for (int j = threadIdx.x; j < shape.group * kPageTokenCount; j += blockDim.x) {
      const int head = j / kPageTokenCount;
      const int slot = j % kPageTokenCount;
      if (slot >= count) continue;
      const float x = OracleScore(logits[j]);
      u.sample_logits[head * u.sample_token_count + i * kPageTokenCount + slot] = x;
      if (first + slot >= u.begin) atomicMax(&u.state->reference[head], OrderedBits(x));
    }
  }
}

// Bins of every token. Grid (blocks, units).
__global__ void ScoreOracleKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  float* queries = memory;
  float* logits = queries + shape.group * shape.head_dim;
  float* tile = logits + shape.group * kPageTokenCount;
  LoadScaledQueries(shape, u, queries);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  for (int64_t page_index = blockIdx.x; page_index < page_count; page_index += gridDim.x) {
    const int64_t first = page_index * kPageTokenCount;
    const int64_t wanted = min(static_cast<int64_t>(kPageTokenCount), u.end - first);
    const int count = wanted > 0 ? static_cast<int>(wanted) : 0;
    ExactPageLogits(shape, u, page_index, count, queries, tile, logits);
    for (int slot = threadIdx.x; slot < kPageTokenCount && first + slot < u.n; slot += blockDim.x) {
      const int64_t token = first + slot;
      const bool candidate = token >= u.begin && token < u.end;
      float score = 0;
      for (int h = 0; candidate && h < shape.group; ++h) {
        const float x = logits[h * kPageTokenCount + slot] * kExpLog2E;
        const float e = ScoreExp2(x - FromOrderedBits(state.reference[h]));
        score = fmaf(e, ScoreHeadWeight(state.mass[h]), score);
        if (u.by_mass) {
          u.head_bins[h * u.n + token] =
              static_cast<uint16_t>(__float_as_uint(e) >> kScoreBinShift);
        }
      }
      const uint32_t bin = __float_as_uint(score) >> kScoreBinShift;
      u.bins[token] = candidate ? static_cast<uint16_t>(bin) : kNoBin;
      if (candidate) atomicAdd(&u.histogram[bin], 1u);
    }
  }
}

}  // namespace spillway::cuda
