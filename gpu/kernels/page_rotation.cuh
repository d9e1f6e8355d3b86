#pragma once

#include <cuda_pipeline_primitives.h>

#include "gpu/kernels/page_keys.cuh"
#include "gpu/kernels/quantiser.cuh"

// A page's keys times P^T, a register-blocked matrix product: 128 rotated
// dimensions a pass, each thread 8 tokens x 8 dimensions; and the codes of what
// it gives.
namespace spillway::cuda {

inline constexpr int kPassDims = 128;
inline constexpr int kSliceRows = 16;  // of P^T, double-buffered
inline constexpr int kSliceFloats = kSliceRows * kPassDims;
// Rotated dimensions at once in shared memory: with one pass they take the place
// of the keys, with two that of both slices.
inline constexpr int kChunkDims = 2 * kSliceFloats / kPageTokenCount;

// Starts the copy of rows [row, row + 16) and columns [column, column + 128)
// of P^T, 0 beyond its edge.
__device__ inline void CopySlice(const float* transposed, int dim, int row, int column,
                                 float* slice) {
  static_assert(kPassDims == 32 * 4);  // a warp a row
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

// Which tokens and dimensions of a pass a thread has: [4 a, 4 a + 4) and 64
// further on, [4 b, 4 b + 4) and 64 further on. Of a warp's threads 4 x 8 have
// neighbouring ones, in an order in which the two halves of a 16-byte shared
// load by half a warp fall together.
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

// sum[t][j] += over the slice's rows, ascending: o of token t times P^T.
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

// y [end - begin][128] of the sums of the pass's dimensions [begin, end).
__device__ inline void StoreRotated(const float (&sum)[8][8], const PassThread& at, int begin,
                                    int end, float* y) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int first = at.dim + part * (kPassDims / 2);
    if (first < begin || first >= end) continue;
    float* out = y + TileAt<4>(first - begin, at.token);  // the permutation of all four rows
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

// Bits 0, 4, ... 28 as one byte.
__device__ inline uint32_t EveryFourthBit(uint32_t x) {
  x &= 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000F000Fu;
  return (x | x >> 12) & 0xFFu;
}

// Stores the code words of one token's dimensions [column, column + dims), of
// which y [dims][128] holds the rotated values. column is a multiple of 32.
__device__ inline void StoreWords(const Quantiser& quantiser, const CodeTiling& tiling,
                                  const float* y, int token, int column, int dims,
                                  std::byte* page) {
  // All of one fragment, whose words stand four apart.
  static_assert(kPassDims == kFragmentWords * 32);
  uint32_t* out = reinterpret_cast<uint32_t*>(page) + tiling.word_offset(0, token, column / 32);
  const int plane_words = tiling.fragment_offset(1, 0, 0);
#pragma unroll 1
  for (int word = 0; word * 32 < dims; ++word) {
    uint32_t codes[4] = {};  // of eight dimensions each, four bits a dimension
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

// dot += <y, t> over y [dims][128] of one token, t in units of the step.
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

// Codes and factors of the page's keys x [d][128], of length 1; radius [128] are
// their distances. slices: two of P^T, the first of which was asked for at
// (0, 0). Begins with a barrier.
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
      // The slice is there for all threads, and all have left the one before.
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
      __syncthreads();  // what y takes the place of has been read
      StoreRotated(sum, at, begin, end, y);
      __syncthreads();
      // Half of the threads have a token each for the chain of the factor, half
      // for the code.
      int token = threadIdx.x % kPageTokenCount;
      asm volatile("" : "+r"(token));  // no addresses of it in registers meanwhile
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
