#pragma once

#include "gpu/kernels/rows.cuh"
#include "gpu/methods/buckets.cuh"
#include "gpu/methods/sections.h"
#include "host/methods/int4_keys/int4_range.h"

// Fills the sections behind the codes of index pages.
namespace spillway::cuda {

inline constexpr int kSectionThreads = 128;

// Stores elements x[channels[i]] (null: x[i]) of one token in four bits each, and their range.
__device__ inline void StoreInt4(const float* x, const uint16_t* channels, int count, int slot,
                                 std::byte* section) {
  auto* words = reinterpret_cast<uint32_t*>(section) + slot;
  const auto element = [&](int i) { return x[channels == nullptr ? i : channels[i]]; };
  float min = INFINITY, max = -INFINITY;
  for (int i = 0; i < count; ++i) {
    const float e = element(i);
    min = e < min ? e : min;
    max = max < e ? e : max;
  }
  const Int4Range range = Int4Range::Of(min, max);
  for (int w = 0; w < count / 8; ++w) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= range.Code(element(8 * w + i)) << (4 * i);
    words[w * kPageTokenCount] = word;
  }
  words[count / 8 * kPageTokenCount] = range.Pack();
}

// REQUIRES: x is exactly representable in the dtype.
__device__ inline void StoreElement(DType dtype, std::byte* base, int i, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(base)[i] = x;
  } else if (dtype == DType::kF16) {
    reinterpret_cast<__half*>(base)[i] = __float2half_rn(x);
  } else {
    reinterpret_cast<uint16_t*>(base)[i] = static_cast<uint16_t>(__float_as_uint(x) >> 16);
  }
}

// Stores the bounds of the Quest pages that hold tokens [begin, end) of an index page, over their
// keys before `end`. rows: those of the index page.
__device__ inline void StoreBounds(const EncodeWork& work, const KeySections& sections,
                                   const std::byte* rows, int begin, int end, std::byte* section) {
  const int d = work.head_dim;
  const int pages = sections.bound_pages;
  const int tokens = static_cast<int>(sections.bound_page_tokens());
  for (int page = begin / tokens; page * tokens < end; ++page) {
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
      float low = INFINITY, high = -INFINITY;
      for (int t = page * tokens; t < min(end, (page + 1) * tokens); ++t) {
        const float x = LoadElement(work.dtype, rows + t * work.row_bytes, i);
        low = x < low ? x : low;
        high = high < x ? x : high;
      }
      StoreElement(work.dtype, section, i * pages + page, low);
      StoreElement(work.dtype, section, (d + i) * pages + page, high);
    }
  }
}

// Grid (index pages, KV heads). Shared memory: a tile of rows.
__global__ void __launch_bounds__(kSectionThreads)
    EncodeSectionsKernel(EncodeWork work, SectionWeights weights) {
  extern __shared__ __align__(16) float tile[];
  const int d = work.head_dim;
  const int head = blockIdx.y;
  const int64_t page = work.begin / kPageTokenCount + blockIdx.x;
  const int64_t base = page * kPageTokenCount;
  const int begin = static_cast<int>(max(work.begin - base, int64_t{0}));
  const int end = static_cast<int>(min(work.end - base, int64_t{kPageTokenCount}));
  const std::byte* rows = work.row_pages[head * work.row_page_capacity + page];
  const KeySections& at = weights.sections;
  std::byte* out = work.code_pages[head * work.code_page_capacity + page] + weights.offset;
  const float* centre = work.centre + head * d;
  const uint16_t* channels = weights.channels + head * at.label_channels;
  const int tile_rows = TileRows(d);
  const int stride = TileStride(d);
  for (int first = begin; first < end; first += tile_rows) {
    const int m = min(tile_rows, end - first);
    __syncthreads();
    LoadTile(
        work.format(), d, m, [&](int i) { return rows + (first + i) * work.row_bytes; }, tile);
    __syncthreads();
    const int row = threadIdx.x % tile_rows;
    const float* x = tile + row * stride;
    if (row < m && threadIdx.x / tile_rows == 0 && at.int4_channels > 0) {
      StoreInt4(x, nullptr, d, first + row, out + at.int4_keys());
    }
    if (row < m && threadIdx.x / tile_rows == 1 && at.label_channels > 0) {
      StoreInt4(x, channels, at.label_channels, first + row, out + at.labels());
    }
    if (at.tables == 0) continue;
    __syncthreads();
    for (int i = threadIdx.x; i < m * d; i += blockDim.x) {
      tile[i / d * stride + i % d] -= centre[i % d];
    }
    __syncthreads();
    auto* names = reinterpret_cast<uint16_t*>(out + at.buckets());
    const int width = at.tables * weights.lsh_bits;
    for (int i = threadIdx.x; i < m * at.tables; i += blockDim.x) {
      const int table = i % at.tables;
      const int token = i / at.tables;
      names[int64_t{table} * kPageTokenCount + first + token] =
          BucketName(weights.projections, width, weights.lsh_bits, table, tile + token * stride, d);
    }
  }
  if (at.bound_pages > 0) StoreBounds(work, at, rows, begin, end, out + at.bounds());
}

}  // namespace spillway::cuda
