#pragma once

#include "gpu/kernels/page_rotation.cuh"
#include "host/core/value_code.h"

// Codes of a page's values (host/core/value_code.h), bit-equal to those of the CPU device. All
// functions are for blocks of kPageThreads threads.
namespace spillway::cuda {

// kStages stages of a Walsh-Hadamard transform of rows [0, size) of x, from the one with this span
// on. A thread has 2^kStages rows of four tokens at a time. Ends with a barrier.
template <int kStages>
__device__ inline void HadamardStages(float* x, int first, int size, int span) {
  constexpr int kRows = 1 << kStages;
  const int quad = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < size / kRows; i += kPageWarps) {
    const int row = first + i / span * span * kRows + i % span;
    float4 v[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r] = QuadAt(x, row + r * span, quad);
#pragma unroll
    for (int apart = 1; apart < kRows; apart *= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if ((r & apart) != 0) continue;
        const float4 a = v[r], b = v[r + apart];
        v[r] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
        v[r + apart] = make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) QuadAt(x, row + r * span, quad) = v[r];
  }
  __syncthreads();
}

// x = H x. scale: HadamardScale(). Begins and ends with a barrier. Not inlined, like the function
// below: the registers of the keys' product are full.
__device__ __noinline__ inline void TurnValues(int dim, float scale, float* x) {
  const int quad = threadIdx.x % 32;
  const int size = HadamardSize(dim);
  for (int part = 0; part < HadamardCount(dim); ++part) {
    const int first = part == 0 ? 0 : dim - size;
    __syncthreads();
    for (int i = threadIdx.x / 32; i < size; i += kPageWarps) {
      if (!HadamardNegates(part, i)) continue;
      float4& v = QuadAt(x, first + i, quad);
      v = make_float4(-v.x, -v.y, -v.z, -v.w);
    }
    __syncthreads();
    int span = 1;
    for (; span * 8 <= size; span *= 8) HadamardStages<3>(x, first, size, span);
    if (span * 4 == size) HadamardStages<2>(x, first, size, span);
    if (span * 2 == size) HadamardStages<1>(x, first, size, span);
    for (int i = threadIdx.x / 32; i < size; i += kPageWarps) {
      float4& v = QuadAt(x, first + i, quad);
      v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
    }
  }
  __syncthreads();
}

// The words of a part of the codes of four tokens: those of row `row` of tile `tile`. y: turned
// values, [d][128].
__device__ inline void StoreValueWords(const Quantiser& quantiser, const CodeTiling& tiling,
                                       const float* y, int tile, int row, int part, int word,
                                       uint32_t* out) {
  const int width = tiling.value_width(part);
  const int words = tiling.value_words(part);
  const uint32_t mask = (1u << width) - 1;
  const int below = part == 0 ? 0 : 2;
  uint32_t packed = 0;
  for (int p = 0; p < 8 / width; ++p) {
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
      const int token = tile * kCodeTileTokens + octet * 8 + row;
      const uint32_t code = quantiser.Code(y[TileAt<8>(p * words + word, token)]) & 0xFu;
      packed |= (code >> below & mask) << (8 * octet + width * p);
    }
  }
  *out = packed;
}

// Stores the codes and factors of the page's values; the page has their centre. scale:
// HadamardScale(). x [d][128], radius [128], scratch: shared memory, which other threads may still
// read before the first barrier.
__device__ __noinline__ inline void StoreValueCodes(const EncodeWork& work,
                                                    const Quantiser& quantiser, float scale,
                                                    const std::byte* rows, float* x, float* radius,
                                                    PageScratch& scratch, std::byte* page) {
  const int dim = work.head_dim;
  const CodeTiling& tiling = work.tiling;
  __syncthreads();
  const auto* centre = reinterpret_cast<const uint16_t*>(page + tiling.value_centre_offset_bytes());
  for (int i = threadIdx.x; i < dim; i += kPageThreads) {
    scratch.centre[i] = BFloat16ToFloat(centre[i]);
  }
  LoadVectors(work, rows, 1, x);
  __syncthreads();
  DivideByLargest(dim, x, radius, scratch);
  DivideByNorm(dim, x, scratch);
  TurnValues(dim, scale, x);
  if (threadIdx.x < kPageTokenCount) {
    const int token = threadIdx.x;
    float dot = 0, square = 0;
#pragma unroll 8
    for (int j = 0; j < dim; ++j) {
      const float y = x[TileAt<8>(j, token)];
      const float t = quantiser.Centred(y);
      dot = fmaf(y, t, dot);
      square = fmaf(t, t, square);
    }
    const float length = radius[token];
    const float factor = fminf(length * __fdiv_rn(dot, square), 3.0e38f);
    auto* const factors = reinterpret_cast<uint16_t*>(page + tiling.value_factor_offset_bytes());
    factors[CodeTiling::factor_index(token)] =
        length > 0 && dot > 0 ? FloatToBFloat16(factor) : uint16_t{0};
    return;
  }
  // A lane has a row of a tile, and each of four warps every fourth word of it.
  static_assert(kCodeTilesPerPage * 8 == 32 && kPageThreads - kPageTokenCount == 4 * 32);
  const int lane = threadIdx.x % 32;
  auto* out = reinterpret_cast<uint32_t*>(page + tiling.value_code_offset_bytes()) +
              lane * tiling.value_row_words();
  for (int part = 0; part < tiling.value_parts(); ++part) {
    const int words = tiling.value_words(part);
    for (int j = threadIdx.x / 32 % 4; j < words; j += 4) {
      StoreValueWords(quantiser, tiling, x, lane / 8, lane % 8, part, j, out + j);
    }
    out += words;
  }
}

}  // namespace spillway::cuda
