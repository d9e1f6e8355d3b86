#pragma once

#include <cuda_pipeline_primitives.h>

#include "gpu/kernels/page_keys.cuh"
#include "gpu/kernels/quantiser.cuh"

// Multiplies a page's keys by P^T, as a register-blocked matrix product (128 rotated dimensions per
// pass, 8 tokens x 8 dimensions per thread), and computes the codes.
namespace spillway::cuda {

inline constexpr int kPassDims = 128;
inline constexpr int kSliceRows = 16;  // of P^T, double-buffered
inline constexpr int kSliceFloats = kSliceRows * kPassDims;
// With two passes: rotated dimensions in shared memory at a time, in place of both slices. With one
// pass all of them are there, in place of the keys.
inline constexpr int kChunkDims = 2 * kSliceFloats / kPageTokenCount;

// Starts the copy of rows [row, row + 16) and columns [column, column + 128) of P^T to `slice`,
// with 0 beyond the matrix.
__device__ inline void CopySlice(const float* transposed, int dim, int row, int column,
                                 float* slice) {
  static_assert(kPassDims == 32 * 4);  // one warp per row
  const int i = threadIdx.x / 32;
  const int j = threadIdx.x % 32 * 4;
  const bool inside = column + j < dim;
  const float* from = transposed + (row + i) * dim + (inside ? column + j : 0);
  float* to = slice + i * kPassDims + j;
#pragma unroll
  for (int n = 0; n < kSliceRows / kPageWarps; ++n) {
    __pipeline_memcpy_async(to + n * kPageWarps * kPassDims, from + n * kPageWarps * dim, 16,
                            inside ? 0 : 16);
  }
  __pipeline_commit();
}

// The tokens and dimensions of a pass that a thread computes: tokens [4 a, 4 a + 4) and the same +
// 64, dimensions [4 b, 4 b + 4) and the same + 64. A warp covers 4 x 8 neighbouring a and b, in an
// order that lets the hardware combine the halves of a 16-byte shared load by half a warp.
struct PassThread {
  int token;
  int dim;
  __device__ PassThread() {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    token = 4 * (warp % 4 * 4 + (lane >> 4 << 1 | (lane & 1)));
    dim = 4 * (warp / 4 * 8 + (lane >> 1 & 7));
  }
};

// sum[t][j] += token t's unit vector o times the slice of P^T, over its rows in ascending order.
__device__ inline void MultiplySlice(const float* x, int row, const float* slice,
                                     const PassThread& at, float (&sum)[8][8]) {
#pragma unroll
  for (int half = 0; half < kSliceRows; half += 8) {
    const float* o = x + TileAt<8>(row + half, at.token);
    const float* p = slice + half * kPassDims + at.dim;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float a[8], b[8];
      *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(o + i * kPageTokenCount);
      *reinterpret_cast<float4*>(a + 4) =
          *reinterpret_cast<const float4*>(o + i * kPageTokenCount + kPageTokenCount / 2);
      *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(p + i * kPassDims);
      *reinterpret_cast<float4*>(b + 4) =
          *reinterpret_cast<const float4*>(p + i * kPassDims + kPassDims / 2);
#pragma unroll
      for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[t][j] = fmaf(b[j], a[t], sum[t][j]);
      }
    }
  }
}

// Stores the sums of the pass's dimensions [begin, end) to y [end - begin][128].
__device__ inline void StoreRotated(const float (&sum)[8][8], const PassThread& at, int begin,
                                    int end, float* y) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int first = at.dim + part * (kPassDims / 2);
    if (first < begin || first >= end) continue;
    float* out = y + TileAt<4>(first - begin, at.token);  // all four rows have this permutation
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int j = 4 * part + n;
      float* row = out + n * kPageTokenCount;
      *reinterpret_cast<float4*>(row) = make_float4(sum[0][j], sum[1][j], sum[2][j], sum[3][j]);
      *reinterpret_cast<float4*>(row + kPageTokenCount / 2) =
          make_float4(sum[4][j], sum[5][j], sum[6][j], sum[7][j]);
    }
  }
}

// Packs bits 0, 4, ..., 28 into one byte.
__device__ inline uint32_t EveryFourthBit(uint32_t x) {
  x &= 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000F000Fu;
  return (x | x >> 12) & 0xFFu;
}

// Stores the code words of one token for dimensions [column, column + dims). y [dims][128] has the
// rotated values. column is a multiple of 32.
__device__ inline void StoreWords(const Quantiser& quantiser, const CodeTiling& tiling,
                                  const float* y, int token, int column, int dims,
                                  std::byte* page) {
  // The words of a pass belong to one fragment, in which a token's words are four apart.
  static_assert(kPassDims == kFragmentWords * 32);
  uint32_t* out = reinterpret_cast<uint32_t*>(page) + tiling.word_offset(0, token, column / 32);
  const int plane_words = tiling.fragment_offset(1, 0, 0);
#pragma unroll 1
  for (int word = 0; word * 32 < dims; ++word) {
    uint32_t codes[4] = {};  // of eight dimensions each, four bits per dimension
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int first = word * 32 + n * 8;
      if (first >= dims) break;
#pragma unroll
      for (int j = first; j < first + 8; ++j) {
        codes[n] = __funnelshift_r(codes[n], quantiser.Code(y[TileAt<4>(j, token)]), 4);
      }
    }
#pragma unroll 1
    for (int plane = 0; plane < tiling.planes; ++plane) {
      out[plane * plane_words + word * 4] =
          EveryFourthBit(codes[0] >> plane) | EveryFourthBit(codes[1] >> plane) << 8 |
          EveryFourthBit(codes[2] >> plane) << 16 | EveryFourthBit(codes[3] >> plane) << 24;
    }
  }
}

// Returns dot + <y, t> for one token of y [dims][128]; t is the quantised y, in units of the step.
__device__ inline float AddProducts(const Quantiser& quantiser, const float* y, int token, int dims,
                                    float dot) {
  for (int row = 0; row < dims; row += 16) {
#pragma unroll
    for (int j = row; j < row + 16; ++j) {
      const float yj = y[TileAt<4>(j, token)];
      dot = fmaf(yj, quantiser.Centred(yj), dot);
    }
  }
  return dot;
}

// Stores the codes and factors of the page's keys. x [d][128]: unit vectors; radius [128]:
// distances from the centre. slices: two of P^T; the copy of the first, at (0, 0), has been
// started. Begins with a barrier.
__device__ inline void StoreCodes(const EncodeWork& work, const float* transposed,
                                  const Quantiser& quantiser, float* slices, float* x,
                                  const float* radius, std::byte* page) {
  const int dim = work.head_dim;
  const bool one_pass = dim <= kPassDims;
  float* const y = one_pass ? x : slices;
  const int chunk_dims = one_pass ? kPassDims : kChunkDims;
  const PassThread at;
  float dot = 0;
  int buffer = 0;
#pragma unroll 1
  for (int column = 0; column < dim; column += kPassDims) {
    float sum[8][8] = {};
#pragma unroll 1
    for (int row = 0; row < dim; row += kSliceRows) {
      // Now all threads can read the slice, and none still reads the one before.
      __pipeline_wait_prior(0);
      __syncthreads();
      if (row + kSliceRows < dim) {
        CopySlice(transposed, dim, row + kSliceRows, column, slices + (buffer ^ 1) * kSliceFloats);
      }
      MultiplySlice(x, row, slices + buffer * kSliceFloats, at, sum);
      buffer ^= 1;
    }
    const int dims = min(kPassDims, dim - column);
#pragma unroll 1
    for (int begin = 0; begin < dims; begin += chunk_dims) {
      const int end = min(begin + chunk_dims, dims);
      __syncthreads();  // all threads have read what y overwrites
      StoreRotated(sum, at, begin, end, y);
      __syncthreads();
      // Half of the threads compute the factors' dot products, the others the codes; one token
      // each.
      int token = threadIdx.x % kPageTokenCount;
      asm volatile("" : "+r"(token));  // so that its addresses take no registers before this
      if (threadIdx.x < kPageTokenCount) {
        dot = AddProducts(quantiser, y, token, end - begin, dot);
      } else {
        StoreWords(quantiser, work.tiling, y, token, column + begin, end - begin, page);
      }
    }
    if (column + kPassDims < dim) {
      __syncthreads();
      CopySlice(transposed, dim, 0, column + kPassDims, slices + buffer * kSliceFloats);
    }
  }
  const int token = threadIdx.x;
  if (token >= kPageTokenCount) return;
  StoreFactor(work.tiling, page, token, Factor(radius[token], dot, quantiser.step));
}

}  // namespace spillway::cuda
