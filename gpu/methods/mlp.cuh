#pragma once

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/matrix_columns.cuh"
#include "gpu/methods/mlp.h"

// Codes of keys and queries by the hash MLPs (host/methods/weights/mlp.h). Every sum runs in the
// same order as on the CPU.
namespace spillway::cuda {

// Keys of a layer as the vectors of MLP blockIdx.y: vector t is the key of token t of the KV head.
// Each block takes an aligned run of tokens, which lies in one page.
struct KeyVectors {
  EncodeWork work;
  int codes;  // codes of a key, each by its own MLP
  int words;  // 32-bit words of a code

  __device__ int Head() const { return static_cast<int>(blockIdx.y) / codes; }
  __device__ int64_t First(int per_block) const {
    return (work.begin / per_block + blockIdx.x) * per_block;
  }
  __device__ bool Has(int64_t token) const { return token >= work.begin && token < work.end; }
  // Elements [4 i, 4 i + 4).
  __device__ float4 Load(int64_t token, int i) const {
    const std::byte* const* pages = work.row_pages + Head() * work.row_page_capacity;
    const float4 k = LoadFour(work.dtype, RowAddress(pages, work.row_bytes, token), i);
    const float* centre = work.centre + Head() * work.head_dim;
    const float4 c = reinterpret_cast<const float4*>(centre)[i];
    return make_float4(k.x - c.x, k.y - c.y, k.z - c.z, k.w - c.w);
  }
  __device__ void Store(int64_t token, int word, uint32_t bits) const {
    std::byte* page = work.code_pages[Head() * work.code_page_capacity + token / kPageTokenCount];
    const int first = static_cast<int>(blockIdx.y) % codes * words;
    const int slot = static_cast<int>(token % kPageTokenCount);
    reinterpret_cast<uint32_t*>(page)[work.tiling.word_offset(0, slot, first + word)] = bits;
  }
};

// Queries as the vectors of MLP blockIdx.y, `group` for each MLP.
struct QueryVectors {
  const float* x;  // [MLPs][group][d]
  int head_dim;
  int group;
  uint32_t* bits;  // [MLPs][group][words]
  int words;

  __device__ int64_t First(int per_block) const { return int64_t{blockIdx.x} * per_block; }
  __device__ bool Has(int64_t vector) const { return vector < group; }
  __device__ float4 Load(int64_t vector, int i) const {
    return reinterpret_cast<const float4*>(x + Row(vector) * head_dim)[i];
  }
  __device__ void Store(int64_t vector, int word, uint32_t value) const {
    bits[Row(vector) * words + word] = value;
  }

 private:
  __device__ int64_t Row(int64_t vector) const { return int64_t{blockIdx.y} * group + vector; }
};

// As on the CPU: the exponent is capped, so that exp() stays finite.
__device__ inline float Silu(float z) { return __fdiv_rn(z, 1.0f + expf(fminf(-z, 88.0f))); }

// Hidden columns that a thread computes at a time.
template <int kColumns>
inline constexpr int kHiddenColumns = kColumns < 2 ? kColumns : 2;

template <int kColumns>
inline constexpr int kMlpThreadsMax = kColumns == 2 ? 128 : 256;

// Shared memory of MlpKernel: x [kVectors][d] and a panel of z; with two hidden layers also the
// whole first one, [kVectors][inner_dim].
template <int kVectors, int kColumns>
constexpr int MlpSharedBytes(int head_dim, int inner_dim, int threads) {
  return kVectors * (head_dim + inner_dim +
                     threads * kHiddenColumns<kColumns>)*static_cast<int>(sizeof(float));
}

// Loads a block's vectors to x [kVectors][d]; 0 for vectors that do not exist.
template <int kVectors, typename Vectors>
__device__ void LoadVectors(const Vectors& vectors, int64_t first, int dim, float* x) {
  constexpr int kLoads = 8;  // in flight: rows may lie in host memory
  const int row_pieces = dim / 4;
  const int pieces = kVectors * row_pieces;
  for (int base = threadIdx.x; base < pieces; base += kLoads * blockDim.x) {
    float4 piece[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int at = base + n * blockDim.x;
      piece[n] = make_float4(0, 0, 0, 0);
      if (at < pieces && vectors.Has(first + at / row_pieces)) {
        piece[n] = vectors.Load(first + at / row_pieces, at % row_pieces);
      }
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int at = base + n * blockDim.x;
      if (at < pieces) reinterpret_cast<float4*>(x)[at] = piece[n];
    }
  }
}

// out = SiLU(x W + b) for a block's vectors: x [kVectors][dim], out [kVectors][width], both in
// shared memory. The caller synchronises.
template <int kVectors>
__device__ void HiddenLayer(const float* w, const float* b, int dim, int width, const float* x,
                            float* out) {
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum[1][kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[0][v] = b[column];
    MatrixColumns<1, 16>(w, dim, width, column, 0).MultiplyAdd(x, dim, sum);
#pragma unroll 2
    for (int v = 0; v < kVectors; ++v) out[v * width + column] = sum[0][v];
#pragma unroll 2
    for (int v = 0; v < kVectors; ++v) out[v * width + column] = Silu(out[v * width + column]);
  }
}

// A block computes kVectors vectors of one MLP, so that it reads each weight once for all of them.
// A thread computes kColumns outputs of each, blockDim.x apart. REQUIRES: blockDim.x is a multiple
// of 32, kColumns * blockDim.x >= hash_bits, and with `residual` kHiddenColumns * blockDim.x >=
// hidden_dim.
template <int kVectors, int kColumns, typename Vectors>
__global__ void __launch_bounds__(256) MlpKernel(Vectors vectors, MlpWeightsView weights, int dim) {
  constexpr int kHidden = kHiddenColumns<kColumns>;
  constexpr int kAhead = kVectors * kColumns > 4 ? 16 : 32;  // weights of a thread in flight
  extern __shared__ float4 shared[];
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  const int hidden = weights.hidden_dim;
  const int bits = weights.hash_bits;
  const int panel = threads * kHidden;
  float* x = reinterpret_cast<float*>(shared);  // [kVectors][dim]
  float* z = x + kVectors * dim;                // [kVectors][panel]
  const int64_t head = blockIdx.y;
  const int64_t first = vectors.First(kVectors);
  const float* w1 = weights.w1 + head * dim * hidden;
  const float* b1 = weights.b1 + head * hidden;
  const float* w2 = weights.w2 + head * hidden * bits;
  const float* b2 = weights.b2 == nullptr ? nullptr : weights.b2 + head * bits;

  LoadVectors<kVectors>(vectors, first, dim, x);
  if (weights.w3 != nullptr) {
    // The first of two hidden layers; the second is then computed like a single one.
    float* const inner = z;
    z += kVectors * hidden;
    __syncthreads();
    HiddenLayer<kVectors>(w1, b1, dim, hidden, x, inner);
    x = inner;
    dim = hidden;
    w1 = weights.w2 + head * hidden * hidden;
    b1 = weights.b2 + head * hidden;
    w2 = weights.w3 + head * hidden * bits;
    b2 = weights.b3 + head * bits;
  }
  float y[kColumns][kVectors];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = min(c * threads + thread, bits - 1);
    const float bias = b2 == nullptr ? 0.0f : b2[column];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) y[c][v] = bias;
  }
  __syncthreads();

#pragma unroll 1
  for (int base = 0; base < hidden; base += panel) {
    float sum[kHidden][kVectors];
#pragma unroll
    for (int c = 0; c < kHidden; ++c) {
      const float bias = b1[min(base + c * threads + thread, hidden - 1)];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) sum[c][v] = bias;
    }
    MatrixColumns<kHidden, kAhead / kHidden>(w1, dim, hidden, base + thread, threads)
        .MultiplyAdd(x, dim, sum);
    __syncthreads();  // the previous panel has been read
#pragma unroll
    for (int c = 0; c < kHidden; ++c) {
      float* out = z + c * threads + thread;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) out[v * panel] = sum[c][v];
      const int column = base + c * threads + thread;
      if (column >= hidden) continue;
#pragma unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const float a = Silu(out[v * panel]);
        out[v * panel] = weights.residual ? a + x[v * dim + column] : a;
      }
    }
    __syncthreads();
    MatrixColumns<kColumns, kAhead / kColumns>(w2 + static_cast<int64_t>(base) * bits,
                                               min(panel, hidden - base), bits, thread, threads)
        .MultiplyAdd(z, panel, y);
  }

  const int lane = thread % 32;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = c * threads + thread;
    if (column >= bits) break;  // whole warps: bits is a multiple of 32
    uint32_t word = 0;          // of vector `lane`
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float a = weights.residual ? y[c][v] + z[v * panel + column] : y[c][v];
      const uint32_t signs = __ballot_sync(kFullWarp, a > 0);
      if (lane == v) word = signs;
    }
    if (lane < kVectors && vectors.Has(first + lane)) {
      vectors.Store(first + lane, column / 32, word);
    }
  }
}

}  // namespace spillway::cuda
