#pragma once

#include "gpu/kernels/page_rows.cuh"

// A page's keys in shared memory, their centre and their distances from it
// (host/core/page_index.h). All functions are for blocks of kPageThreads threads.
namespace spillway::cuda {

inline constexpr int kPageThreads = 256;
inline constexpr int kPageWarps = kPageThreads / 32;
inline constexpr int kPageQuads = kPageTokenCount / 4;
static_assert(kPageQuads == 32);  // one lane per quad

// Tiles are [row][128] floats. Within a row, groups of four tokens are permuted by row / kRows, so
// that threads that access different rows use different banks.
template <int kRows>
__device__ inline int TileAt(int row, int token) {
  return row * kPageTokenCount + (token ^ (static_cast<unsigned>(row) / kRows % 8 * 4));
}
__device__ inline float4& QuadAt(float* x, int row, int quad) {
  return *reinterpret_cast<float4*>(x + TileAt<8>(row, 4 * quad));
}

// What a block keeps besides the keys until it rotates them, aligned to 16 bytes.
struct PageScratch {
  float4 largest[kPageWarps][kPageQuads];
  float4 inverse[kPageQuads];  // 1 / norm of each key after DivideByLargest()
  float centre[kHeadDimMax];   // c, as fp32
  float value_centre[kHeadDimMax];
  float square[kPageTokenCount];    // see PageValues
  float exponent[kPageTokenCount];  // ValueExponent() of each value
};

// Stores a 16-byte piece of a key, its elements from i on, to x as fp32.
__device__ inline void StorePiece(DType dtype, uint4 raw, int i, int token, float* x) {
  float* out = x + TileAt<8>(i, token);
  if (dtype == DType::kF32) {
    out[0] = __uint_as_float(raw.x);
    out[kPageTokenCount] = __uint_as_float(raw.y);
    out[2 * kPageTokenCount] = __uint_as_float(raw.z);
    out[3 * kPageTokenCount] = __uint_as_float(raw.w);
    return;
  }
  const float4 low = WidenFour(dtype, raw.x, raw.y);
  const float4 high = WidenFour(dtype, raw.z, raw.w);
  out[0] = low.x;
  out[kPageTokenCount] = low.y;
  out[2 * kPageTokenCount] = low.z;
  out[3 * kPageTokenCount] = low.w;
  out[4 * kPageTokenCount] = high.x;
  out[5 * kPageTokenCount] = high.y;
  out[6 * kPageTokenCount] = high.z;
  out[7 * kPageTokenCount] = high.w;
}

// The 16-byte pieces of a page's keys that a thread handles: every kPageThreads-th one.
struct PieceCursor {
  int token;
  int piece;
  __device__ explicit PieceCursor(int pieces)
      : token(threadIdx.x / pieces), piece(threadIdx.x % pieces) {}
  // REQUIRES: kPageThreads = token_step * pieces + piece_step.
  __device__ void Advance(int pieces, int token_step, int piece_step) {
    token += token_step;
    piece += piece_step;
    if (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
};

// LoadVectors() of rows of 8 bits.
__device__ __noinline__ inline void LoadInt8Vectors(const EncodeWork& work, const std::byte* rows,
                                                    int half, float* x) {
  constexpr int kLoads = 8;  // in flight, because rows may be in host memory
  __shared__ float scale[kPageTokenCount];
  const int d = work.head_dim;
  const int pieces = d / 16;
  const int row_bytes = static_cast<int>(work.row_bytes);
  const int loads = pieces * kPageTokenCount;
  if (threadIdx.x < kPageTokenCount) {
    const float2 scales = Int8Scales(d, rows + static_cast<int>(threadIdx.x) * row_bytes);
    scale[threadIdx.x] = half == 0 ? scales.x : scales.y;
  }
  __syncthreads();
  for (int base = threadIdx.x; base < loads; base += kLoads * kPageThreads) {
    uint4 raw[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = base + n * kPageThreads;
      if (i >= loads) break;
      const std::byte* const row = rows + i / pieces * row_bytes;
      raw[n] = __ldcs(reinterpret_cast<const uint4*>(row + half * d) + i % pieces);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int i = base + n * kPageThreads;
      if (i >= loads) break;
      const int token = i / pieces;
      const uint32_t words[4] = {raw[n].x, raw[n].y, raw[n].z, raw[n].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float4 four = Int8Four(words[w], scale[token]);
        float* const to = x + TileAt<8>(i % pieces * 16 + 4 * w, token);
        to[0] = four.x;
        to[kPageTokenCount] = four.y;
        to[2 * kPageTokenCount] = four.z;
        to[3 * kPageTokenCount] = four.w;
      }
    }
  }
  __syncthreads();
  const int first = half == 0 ? kInt8ValueHighCount : 0;
  const int highs = half == 0 ? Int8KeyHighCount(d) : kInt8ValueHighCount;
  for (int i = threadIdx.x; i < highs * kPageTokenCount; i += kPageThreads) {
    const int token = i / highs;
    const Int8HighPart high = LoadHighPart(d, rows + token * row_bytes, first + i % highs);
    x[TileAt<8>(high.element - half * d, token)] +=
        static_cast<float>(high.high * kInt8HighStep) * scale[token];
  }
  __syncthreads();
  if (work.dtype == DType::kF32) return;
  for (int i = threadIdx.x; i < d * kPageTokenCount; i += kPageThreads) {
    x[i] = RoundToDType(work.dtype, x[i]);
  }
}

// Loads the keys (half 0) or values of a page's rows into x [d][128]. Ends without a barrier. All
// threads of the block.
__device__ inline void LoadVectors(const EncodeWork& work, const std::byte* rows, int half,
                                   float* x) {
  if (work.row_type == RowType::kInt8) return LoadInt8Vectors(work, rows, half, x);
  rows += half * (work.row_bytes / 2);
  constexpr int kLoads = 8;  // in flight, because rows may be in host memory
  const int piece_elements = PieceElements(work.dtype);
  const int pieces = work.head_dim / piece_elements;  // per key, even
  const int rounds = pieces * kPageTokenCount / kPageThreads;
  const int token_step = kPageThreads / pieces;
  const int piece_step = kPageThreads % pieces;
  const int row_bytes = static_cast<int>(work.row_bytes);
  PieceCursor load(pieces);
  PieceCursor store(pieces);
  for (int done = 0; done < rounds; done += kLoads) {
    uint4 raw[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (done + n >= rounds) break;
      raw[n] = __ldcs(reinterpret_cast<const uint4*>(rows + load.token * row_bytes) + load.piece);
      load.Advance(pieces, token_step, piece_step);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (done + n >= rounds) break;
      StorePiece(work.dtype, raw[n], store.piece * piece_elements, store.token, x);
      store.Advance(pieces, token_step, piece_step);
    }
  }
}

// ---- The centre --------------------------------------------------------------

// The dimension that a thread below d sums over the tokens. Neighbouring threads take dimensions
// eight apart, whose rows use different banks.
__device__ inline int SummedDim(int dim) {
  const int groups = dim / 8;
  return static_cast<int>(threadIdx.x) % groups * 8 + static_cast<int>(threadIdx.x) / groups;
}

// Stores element i of the centre, rounded to bf16, to the page, and as fp32 to shared memory.
__device__ inline void StoreCentre(const CodeTiling& tiling, int i, float mean, std::byte* page,
                                   float* centre) {
  const uint16_t rounded = FloatToBFloat16(mean);
  reinterpret_cast<uint16_t*>(page + tiling.centre_offset_bytes())[i] = rounded;
  centre[i] = BFloat16ToFloat(rounded);
}

// Computes and stores the page's centre: the mean of the keys x, or 0 with raw_keys. Ends without a
// barrier.
__device__ inline void Centre(const EncodeWork& work, bool raw_keys, float* x, std::byte* page,
                              float* centre) {
  if (static_cast<int>(threadIdx.x) >= work.head_dim) return;
  const int i = SummedDim(work.head_dim);
  double sum = 0;
  for (int quad = 0; quad < kPageQuads && !raw_keys; quad += 8) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const float4 k = QuadAt(x, i, quad + q);
      sum += k.x;
      sum += k.y;
      sum += k.z;
      sum += k.w;
    }
  }
  StoreCentre(work.tiling, i, static_cast<float>(sum / kPageTokenCount), page, centre);
}

// The distance of a token's key from a centre. x must hold the unchanged keys.
__device__ inline float TokenRadius(int dim, const float* centre, const float* x, int token) {
  float largest = 0;
  for (int i = 0; i < dim; ++i) {
    largest = fmaxf(largest, fabsf(x[TileAt<8>(i, token)] - centre[i]));
  }
  float sum = 0;
  for (int i = 0; i < dim; ++i) {
    const float r = __fdiv_rn(x[TileAt<8>(i, token)] - centre[i], Divisor(largest));
    sum = fmaf(r, r, sum);
  }
  return RadiusOf(largest, sum);
}

// Whether the largest of a page's radii is more than kStrayFactor times their median: whether more
// than half of them, times kStrayFactor, are below it. The same in all threads.
__device__ inline bool IsUneven(const float* radius) {
  const float4 r = reinterpret_cast<const float4*>(radius)[threadIdx.x % 32];
  // Non-negative floats have the same order as their bits.
  const float largest = __uint_as_float(
      __reduce_max_sync(kFullWarp, __float_as_uint(fmaxf(fmaxf(r.x, r.y), fmaxf(r.z, r.w)))));
  const int smaller = (kStrayFactor * r.x < largest) + (kStrayFactor * r.y < largest) +
                      (kStrayFactor * r.z < largest) + (kStrayFactor * r.w < largest);
  return __reduce_add_sync(kFullWarp, smaller) > kPageTokenCount / 2;
}

// The median of a page's radii, for every warp that calls this.
__device__ inline float MedianRadius(const float* radius) {
  const float4 r = reinterpret_cast<const float4*>(radius)[threadIdx.x % 32];
  return WarpElement<4>({r.x, r.y, r.z, r.w}, kPageTokenCount / 2);
}

// Stores a new centre for a page with keys far from it: the mean of the keys near the median per
// coordinate. Loads the keys into x again, where they stay. Overwrites radius [128] after the first
// barrier, so threads must have read it before the call. All threads.
__device__ inline void CentreAgain(const EncodeWork& work, const std::byte* rows, float* x,
                                   float* radius, std::byte* page, float* centre) {
  const int dim = work.head_dim;
  const int lane = threadIdx.x % 32;
  LoadVectors(work, rows, 0, x);
  __syncthreads();
  for (int i = threadIdx.x / 32; i < dim; i += kPageWarps) {
    const float4 k = QuadAt(x, i, lane);
    const float median = WarpElement<4>({k.x, k.y, k.z, k.w}, kPageTokenCount / 2);
    if (lane == 0) centre[i] = median;
  }
  __syncthreads();
  if (threadIdx.x < kPageTokenCount) {
    radius[threadIdx.x] = TokenRadius(dim, centre, x, threadIdx.x);
  }
  __syncthreads();
  const float most = kStrayFactor * MedianRadius(radius);
  if (static_cast<int>(threadIdx.x) < dim) {
    const int i = SummedDim(dim);
    double sum = 0;
    int count = 0;
    for (int token = 0; token < kPageTokenCount; ++token) {
      if (radius[token] > most) continue;
      sum += x[TileAt<8>(i, token)];
      ++count;
    }
    StoreCentre(work.tiling, i, static_cast<float>(sum / count), page, centre);
  }
  __syncthreads();
}

// ---- Unit vectors ------------------------------------------------------------

// Replaces each key x by (x - c) / max |x - c|, and sets radius [128] to the distances of the keys
// from c. The caller must have passed a barrier; ends with a barrier.
__device__ inline void DivideByLargest(int dim, float* x, float* radius, PageScratch& scratch) {
  constexpr int kRows = 4;  // per thread at a time: all are read before one is written
  // Everything except the sums of squares: a lane handles four tokens, a warp every eighth row.
  const int quad = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float largest[4] = {};
#pragma unroll 4
  for (int i = warp; i < dim; i += kPageWarps) {
    const float c = scratch.centre[i];
    const float4 k = QuadAt(x, i, quad);
    largest[0] = fmaxf(largest[0], fabsf(k.x - c));
    largest[1] = fmaxf(largest[1], fabsf(k.y - c));
    largest[2] = fmaxf(largest[2], fabsf(k.z - c));
    largest[3] = fmaxf(largest[3], fabsf(k.w - c));
  }
  scratch.largest[warp][quad] = make_float4(largest[0], largest[1], largest[2], largest[3]);
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kPageWarps; ++w) {
    const float4 v = scratch.largest[w][quad];
    largest[0] = fmaxf(largest[0], v.x);
    largest[1] = fmaxf(largest[1], v.y);
    largest[2] = fmaxf(largest[2], v.z);
    largest[3] = fmaxf(largest[3], v.w);
  }
  const Quotient over[4] = {Quotient(largest[0]), Quotient(largest[1]), Quotient(largest[2]),
                            Quotient(largest[3])};
#pragma unroll 1
  for (int first = warp; first < dim; first += kRows * kPageWarps) {
    float v[kRows][4];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int i = first + n * kPageWarps;
      if (i >= dim) break;
      const float c = scratch.centre[i];
      const float4 k = QuadAt(x, i, quad);
      v[n][0] = k.x - c;
      v[n][1] = k.y - c;
      v[n][2] = k.z - c;
      v[n][3] = k.w - c;
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int i = first + n * kPageWarps;
      if (i >= dim) break;
      bool fast = true;
#pragma unroll
      for (int t = 0; t < 4; ++t) fast &= over[t].Takes(v[n][t]);
      if (fast) {
#pragma unroll
        for (int t = 0; t < 4; ++t) v[n][t] = over[t].Fast(v[n][t]);
      } else {
#pragma unroll
        for (int t = 0; t < 4; ++t) v[n][t] = over[t].Of(v[n][t]);
      }
      QuadAt(x, i, quad) = make_float4(v[n][0], v[n][1], v[n][2], v[n][3]);
    }
  }
  __syncthreads();
  if (threadIdx.x < kPageTokenCount) {
    const int token = threadIdx.x;
    float sum = 0;
    for (int first = 0; first < dim; first += 16) {
#pragma unroll
      for (int i = first; i < first + 16; ++i) {
        const float r = x[TileAt<8>(i, token)];
        sum = fmaf(r, r, sum);
      }
    }
    float max = 0;
#pragma unroll
    for (int w = 0; w < kPageWarps; ++w) {
      max = fmaxf(max, reinterpret_cast<const float*>(scratch.largest[w])[token]);
    }
    radius[token] = RadiusOf(max, sum);
    const float norm = __fsqrt_rn(max > 0 ? sum : 1.0f);
    reinterpret_cast<float*>(scratch.inverse)[token] = __fdiv_rn(1.0f, norm);
  }
  __syncthreads();
}

// Scales the keys that DivideByLargest() left in x to length 1. Ends without a barrier.
__device__ inline void DivideByNorm(int dim, float* x, const PageScratch& scratch) {
  constexpr int kRows = 8;
  const int quad = threadIdx.x % 32;
  const float4 inverse = scratch.inverse[quad];
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < dim; first += kRows * kPageWarps) {
    float4 v[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n * kPageWarps < dim) v[n] = QuadAt(x, first + n * kPageWarps, quad);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (first + n * kPageWarps >= dim) break;
      QuadAt(x, first + n * kPageWarps, quad) = make_float4(v[n].x * inverse.x, v[n].y * inverse.y,
                                                            v[n].z * inverse.z, v[n].w * inverse.w);
    }
  }
}

}  // namespace spillway::cuda
