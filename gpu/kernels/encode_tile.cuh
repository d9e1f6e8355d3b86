#pragma once

#include <cuda_pipeline_primitives.h>

#include "gpu/kernels/quantiser.cuh"

// The encoder of many keys: a block rotates a tile of tokens of one KV head by
// a register-blocked matrix product, 128 rotated dimensions a pass, each thread
// 8 tokens x 8 dimensions.
namespace spillway::cuda {

inline constexpr int kTileTokens = 64;
inline constexpr int kTileDims = 128;
inline constexpr int kTileThreads = 128;
inline constexpr int kSliceRows = 16;  // of P^T, double-buffered
// Blocks an SM at once: what shared memory holds at d = 128.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kTileBlocks = 3;
#else
inline constexpr int kTileBlocks = 4;
#endif
inline constexpr int kStrips = kTileThreads * 4 / kTileTokens;

// Tiles are [row][64] floats. Every four tokens are permuted by
// row / kRows, so that threads of different rows meet in different banks.
template <int kRows>
__device__ inline int TileAt(int row, int token) {
  return row * kTileTokens + (token ^ (static_cast<unsigned>(row) / kRows % 8 * 4));
}

// Shared memory of EncodeTileKernel: two slices of P^T, x [d][64], and y
// [128][64], which takes the place of x where one pass is all.
inline constexpr int EncodeTileSharedBytes(int head_dim) {
  const int rows = head_dim + (head_dim > kTileDims ? kTileDims : 0);
  return (2 * kSliceRows * kTileDims + rows * kTileTokens) * static_cast<int>(sizeof(float));
}

// The tokens of a tile that are to be encoded.
struct TileRange {
  int begin;
  int end;
  __device__ TileRange(const EncodeWork& work, int64_t first)
      : begin(static_cast<int>(max(work.begin - first, int64_t{0}))),
        end(static_cast<int>(min(work.end - first, int64_t{kTileTokens}))) {}
  __device__ bool Has(int token) const { return token >= begin && token < end; }
};

// A 16-byte piece of a key, its elements from i on, less the centre into x.
__device__ inline void StorePiece(DType dtype, uint4 raw, const float* centre, int i, int token,
                                  float* x) {
  const float4 c = *reinterpret_cast<const float4*>(centre + i);
  float* out = x + TileAt<8>(i, token);
  if (dtype == DType::kF32) {
    out[0] = __uint_as_float(raw.x) - c.x;
    out[kTileTokens] = __uint_as_float(raw.y) - c.y;
    out[2 * kTileTokens] = __uint_as_float(raw.z) - c.z;
    out[3 * kTileTokens] = __uint_as_float(raw.w) - c.w;
    return;
  }
  const float4 c_high = *reinterpret_cast<const float4*>(centre + i + 4);
  const float4 low = WidenFour(dtype, raw.x, raw.y);
  const float4 high = WidenFour(dtype, raw.z, raw.w);
  out[0] = low.x - c.x;
  out[kTileTokens] = low.y - c.y;
  out[2 * kTileTokens] = low.z - c.z;
  out[3 * kTileTokens] = low.w - c.w;
  out[4 * kTileTokens] = high.x - c_high.x;
  out[5 * kTileTokens] = high.y - c_high.y;
  out[6 * kTileTokens] = high.z - c_high.z;
  out[7 * kTileTokens] = high.w - c_high.w;
}

// Which pieces of a tile's keys a thread has: every kTileThreads-th.
struct PieceCursor {
  int token;
  int piece;
  __device__ explicit PieceCursor(int pieces)
      : token(threadIdx.x / pieces), piece(threadIdx.x % pieces) {}
  // kTileThreads = token_step * pieces + piece_step.
  __device__ void Advance(int pieces, int token_step, int piece_step) {
    token += token_step;
    piece += piece_step;
    if (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
};

// k - c of the tile into x. Tokens out of range hold anything finite.
__device__ inline void LoadTile(const EncodeWork& work, int head, int64_t first, float* x) {
  constexpr int kLoads = 16;  // in flight: rows may lie in host memory
  const int piece_elements = work.dtype == DType::kF32 ? 4 : 8;
  const int pieces = work.head_dim / piece_elements;  // of a key, even
  const int rounds = pieces * kTileTokens / kTileThreads;
  const int token_step = kTileThreads / pieces;
  const int piece_step = kTileThreads % pieces;
  const int row_bytes = static_cast<int>(work.row_bytes);
  const std::byte* rows =
      RowAddress(work.row_pages + head * work.row_page_capacity, work.row_bytes, first);
  const float* centre = work.centre + head * work.head_dim;
  const TileRange range(work, first);
  PieceCursor load(pieces);
  PieceCursor store(pieces);
  for (int done = 0; done < rounds; done += kLoads) {
    uint4 raw[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (done + n >= rounds) break;
      raw[n] = make_uint4(0, 0, 0, 0);
      if (range.Has(load.token)) {
        raw[n] = __ldcs(reinterpret_cast<const uint4*>(rows + load.token * row_bytes) + load.piece);
      }
      load.Advance(pieces, token_step, piece_step);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (done + n >= rounds) break;
      StorePiece(work.dtype, raw[n], centre, store.piece * piece_elements, store.token, x);
      store.Advance(pieces, token_step, piece_step);
    }
  }
}

// x = k - c becomes o = x / max|x|, over its norm. Ends without a barrier
// after the last write. length [64]: ||k - c||, for threads [0, 64) to use.
// scratch: 144 elements, free again after the next barrier.
__device__ inline void NormaliseTile(int dim, float* x, float* length, float4* scratch) {
  constexpr int kQuads = kTileTokens / 4;
  float4* largest_of = scratch;                     // [kStrips][kQuads]
  float4* inverse_of = scratch + kStrips * kQuads;  // [kQuads]
  // All but the chain: four tokens of every eighth row.
  const int quad = threadIdx.x % kQuads;
  const int strip = threadIdx.x / kQuads;
  float4 largest = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = strip; i < dim; i += kStrips) {
    const float4 v = *reinterpret_cast<const float4*>(x + TileAt<8>(i, 4 * quad));
    largest.x = fmaxf(largest.x, fabsf(v.x));
    largest.y = fmaxf(largest.y, fabsf(v.y));
    largest.z = fmaxf(largest.z, fabsf(v.z));
    largest.w = fmaxf(largest.w, fabsf(v.w));
  }
  largest_of[strip * kQuads + quad] = largest;
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const float4 v = largest_of[s * kQuads + quad];
    largest.x = fmaxf(largest.x, v.x);
    largest.y = fmaxf(largest.y, v.y);
    largest.z = fmaxf(largest.z, v.z);
    largest.w = fmaxf(largest.w, v.w);
  }
  const float4 divisor =
      make_float4(Divisor(largest.x), Divisor(largest.y), Divisor(largest.z), Divisor(largest.w));
#pragma unroll 2
  for (int i = strip; i < dim; i += kStrips) {
    float4& v = *reinterpret_cast<float4*>(x + TileAt<8>(i, 4 * quad));
    v = make_float4(__fdiv_rn(v.x, divisor.x), __fdiv_rn(v.y, divisor.y), __fdiv_rn(v.z, divisor.z),
                    __fdiv_rn(v.w, divisor.w));
  }
  __syncthreads();
  if (threadIdx.x < kTileTokens) {
    const int token = threadIdx.x;
    float norm_sq = 0;
    for (int first = 0; first < dim; first += 16) {
#pragma unroll
      for (int i = first; i < first + 16; ++i) {
        const float r = x[TileAt<8>(i, token)];
        norm_sq = fmaf(r, r, norm_sq);
      }
    }
    float max = 0;
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      max = fmaxf(max, reinterpret_cast<const float*>(largest_of)[s * kTileTokens + token]);
    }
    const float norm = __fsqrt_rn(max > 0 ? norm_sq : 1.0f);
    length[token] = max * norm;
    reinterpret_cast<float*>(inverse_of)[token] = __fdiv_rn(1.0f, norm);
  }
  __syncthreads();
  const float4 inverse = inverse_of[quad];
#pragma unroll 4
  for (int i = strip; i < dim; i += kStrips) {
    float4& v = *reinterpret_cast<float4*>(x + TileAt<8>(i, 4 * quad));
    v = make_float4(v.x * inverse.x, v.y * inverse.y, v.z * inverse.z, v.w * inverse.w);
  }
}

// Starts the copy of rows [row, row + 16) and columns [column, column + 128)
// of P^T, 0 beyond its edge.
__device__ inline void CopySlice(const float* transposed, int dim, int row, int column,
                                 float* slice) {
  static_assert(kTileDims == 32 * 4);  // a warp a row
  constexpr int kWarps = kTileThreads / 32;
  const int i = threadIdx.x / 32;
  const int j = threadIdx.x % 32 * 4;
  const bool inside = column + j < dim;
  const float* from = transposed + (row + i) * dim + (inside ? column + j : 0);
  float* to = slice + i * kTileDims + j;
#pragma unroll
  for (int n = 0; n < kSliceRows / kWarps; ++n) {
    __pipeline_memcpy_async(to + n * kWarps * kTileDims, from + n * kWarps * dim, 16,
                            inside ? 0 : 16);
  }
  __pipeline_commit();
}

// Which tokens and dimensions of a tile a thread has: [4 a, 4 a + 4) and 32
// further on, [4 b, 4 b + 4) and 64 further on. Of a warp's threads 4 x 8 have
// neighbouring ones, in an order in which the two halves of a 16-byte shared
// load by half a warp fall together.
struct TileThread {
  int token;
  int dim;
  __device__ TileThread() {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    token = 4 * (warp % 2 * 4 + (lane >> 4 << 1 | (lane & 1)));
    dim = 4 * (warp / 2 * 8 + (lane >> 1 & 7));
  }
};

// sum[t][j] += over the slice's rows, ascending: o of token t times P^T.
__device__ inline void MultiplySlice(const float* x, int row, const float* slice,
                                     const TileThread& at, float (&sum)[8][8]) {
#pragma unroll
  for (int half = 0; half < kSliceRows; half += 8) {
    const float* o = x + TileAt<8>(row + half, at.token);
    const float* p = slice + half * kTileDims + at.dim;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float a[8], b[8];
      *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(o + i * kTileTokens);
      *reinterpret_cast<float4*>(a + 4) =
          *reinterpret_cast<const float4*>(o + i * kTileTokens + kTileTokens / 2);
      *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(p + i * kTileDims);
      *reinterpret_cast<float4*>(b + 4) =
          *reinterpret_cast<const float4*>(p + i * kTileDims + kTileDims / 2);
#pragma unroll
      for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[t][j] = fmaf(b[j], a[t], sum[t][j]);
      }
    }
  }
}

// y [dims][64] of the sums.
__device__ inline void StoreRotated(const float (&sum)[8][8], const TileThread& at, int dims,
                                    float* y) {
  float* out = y + TileAt<4>(at.dim, at.token);  // the permutation of all its rows
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int part = j / 4 * (kTileDims / 2);
    if (at.dim + part >= dims) break;
    float* row = out + (part + j % 4) * kTileTokens;
    *reinterpret_cast<float4*>(row) = make_float4(sum[0][j], sum[1][j], sum[2][j], sum[3][j]);
    *reinterpret_cast<float4*>(row + kTileTokens / 2) =
        make_float4(sum[4][j], sum[5][j], sum[6][j], sum[7][j]);
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
// which y [dims][64] holds the rotated values.
__device__ inline void StoreWords(const Quantiser& quantiser, const CodeTiling& tiling,
                                  const float* y, int token, int column, int dims, int slot,
                                  std::byte* page) {
  // A pass is a fragment; its words stand four apart.
  static_assert(kTileDims == kFragmentWords * 32);
  uint32_t* out = reinterpret_cast<uint32_t*>(page) + tiling.word_offset(0, slot, column / 32);
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

// blockIdx.x: tile of 64 tokens from the one that has work.begin on;
// blockIdx.y: KV head.
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    EncodeTileKernel(EncodeWork work, const float* transposed, Quantiser quantiser) {
  extern __shared__ float4 shared[];
  __shared__ float length[kTileTokens];
  float* slices = reinterpret_cast<float*>(shared);
  float* x = slices + 2 * kSliceRows * kTileDims;
  const int dim = work.head_dim;
  float* y = dim > kTileDims ? x + dim * kTileTokens : x;
  const int head = blockIdx.y;
  const int64_t first = (work.begin / kTileTokens + blockIdx.x) * kTileTokens;

  CopySlice(transposed, dim, 0, 0, slices);
  LoadTile(work, head, first, x);
  __syncthreads();
  // The second slice is not copied before the product begins. At d = 256 two
  // blocks fit an SM because nothing else is taken.
  NormaliseTile(dim, x, length, shared + kSliceRows * kTileDims / 4);

  const TileThread at;
  float dot = 0;
  int next_row = 0;
  int next_column = 0;
  int buffer = 0;
  for (int column = 0; column < dim; column += kTileDims) {
    float sum[8][8] = {};
#pragma unroll 1
    for (int row = 0; row < dim; row += kSliceRows) {
      // The slice is there for all threads, and all have left the one before.
      __pipeline_wait_prior(0);
      __syncthreads();
      next_row += kSliceRows;
      if (next_row == dim) {
        next_row = 0;
        next_column += kTileDims;
      }
      if (next_column < dim) {
        CopySlice(transposed, dim, next_row, next_column,
                  slices + (buffer ^ 1) * kSliceRows * kTileDims);
      }
      MultiplySlice(x, row, slices + buffer * kSliceRows * kTileDims, at, sum);
      buffer ^= 1;
    }
    const int dims = min(kTileDims, dim - column);
    __syncthreads();  // y may take the place of x
    StoreRotated(sum, at, dims, y);
    __syncthreads();
    // Warps 0 and 1 have a token a thread for the chain of the factor, warps 2
    // and 3 for the code.
    int token = threadIdx.x % kTileTokens;
    asm volatile("" : "+r"(token));  // no addresses of it in registers meanwhile
    if (threadIdx.x < kTileTokens) {
      for (int row = 0; row < dims; row += 16) {
#pragma unroll
        for (int j = row; j < row + 16; ++j) {
          const float yj = y[TileAt<4>(j, token)];
          dot = fmaf(yj, quantiser.Centred(yj), dot);
        }
      }
    } else if (TileRange(work, first).Has(token)) {
      StoreWords(quantiser, work.tiling, y, token, column, dims,
                 static_cast<int>((first + token) % kPageTokenCount), CodePage(work, head, first));
    }
  }
  const int token = threadIdx.x;
  if (token < kTileTokens && TileRange(work, first).Has(token)) {
    StoreFactor(work.tiling, CodePage(work, head, first),
                static_cast<int>((first + token) % kPageTokenCount),
                Factor(length[token], dot, quantiser.step));
  }
}

}  // namespace spillway::cuda
