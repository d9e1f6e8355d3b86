#pragma once

#include "gpu/kernels/rows.cuh"
#include "host/core/degrees.h"

// Softmax sums over rows. A block processes a split tile by tile: it loads rows to shared memory as
// fp32, computes logits with one thread per (row, query row) and sums x v with one thread per
// dimension. The order of every sum depends on the split alone.
namespace spillway::cuda {

// The sums that a thread keeps, for its dimension and, with moments, for its entry of
// kProjectedPairs.
template <int kRows, bool kMoments>
struct ValueSums {
  float value[kRows] = {};                     // sum x v
  float value_sq[kMoments ? kRows : 1] = {};   // sum x^2 v
  float projected[kMoments ? kRows : 1] = {};  // sum x^2 y_a y_b
};

struct FoldShape {
  RowFormat format;
  int head_dim;
  int rows;  // query rows in use, <= kRows
  // Values are multiplied by inverse_unit and, with moments, projected.
  float inverse_unit = 1;
  const ProjectionSigns* signs = nullptr;
};

// Floats from one row's projected value to the next. With this stride, a quarter-warp that writes
// one float4 for each of eight rows uses different banks.
inline constexpr int kProjectionStride = kProjectionDims + 4;

// Shared memory of a folding block, in floats.
__host__ __device__ inline int FoldFloats(int head_dim, int row_capacity, bool moments) {
  const int tile_rows = TileRows(head_dim);
  const int of_moments = moments ? 1 + row_capacity + kProjectionStride : 0;
  return tile_rows * (TileStride(2 * head_dim) + row_capacity + of_moments) +
         row_capacity * head_dim;
}

// Elements [4 quad, 4 quad + 4) of a value's projection. value: [d], times inverse_unit.
__device__ inline float4 ProjectFour(const float* value, int d, int quad,
                                     const ProjectionSigns& signs) {
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = 4 * quad; i < d; i += kProjectionDims) {
    const float4 v = *reinterpret_cast<const float4*>(value + i);
    y.x += signs.Of(i, v.x);
    y.y += signs.Of(i + 1, v.y);
    y.z += signs.Of(i + 2, v.z);
    y.w += signs.Of(i + 3, v.w);
  }
  return y;
}

// Loads one row's numbers for all query rows.
template <int kRows>
__device__ inline void LoadOfRows(const float* from, float (&x)[kRows]) {
  static_assert(kRows % 4 == 0);
#pragma unroll
  for (int r = 0; r < kRows; r += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + r);
    x[r] = four.x;
    x[r + 1] = four.y;
    x[r + 2] = four.z;
    x[r + 3] = four.w;
  }
}

// Folds `count` rows; row_at(i) is the address of row i. visible(r, i): whether query row r sees
// row i. bad(i): called for a visible logit that is not finite.
// weigh(r, i, k, l): what replaces a visible logit l; k is the row's key. queries: [kRows][d],
// scaled. memory: the rest of FoldFloats(). Needs one thread per dimension and, with moments, per
// entry of kProjectedPairs. kInFlight: see LoadTile().
template <int kRows, bool kMoments, int kInFlight, typename RowAt, typename Visible, typename Bad,
          typename Weigh>
__device__ inline void FoldRows(const FoldShape& shape, int64_t count, RowAt row_at,
                                Visible visible, Bad bad, Weigh weigh, const float* queries,
                                float* memory, SoftmaxSums* sums,
                                ValueSums<kRows, kMoments>& values) {
  const int d = shape.head_dim;
  const int tile_rows = TileRows(d);
  const int stride = TileStride(2 * d);
  float* tile = memory;
  float* weights = tile + tile_rows * stride;  // [tile_rows][kRows] logits, then x
  // With moments:
  float* squares = weights + tile_rows * kRows;                // [tile_rows][kRows] x^2
  float* projections = squares + tile_rows * kRows;            // [tile_rows][kProjectionStride] y
  float* norms = projections + tile_rows * kProjectionStride;  // [tile_rows] ||v||^2
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  for (int64_t at = 0; at < count; at += tile_rows) {
    const int m = static_cast<int>(min(static_cast<int64_t>(tile_rows), count - at));
    __syncthreads();
    const auto in_units = [&](int element, float4 x) {
      const float factor = element < d ? 1.0f : shape.inverse_unit;
      return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    };
    LoadTile<kInFlight>(
        shape.format, 2 * d, m, [&](int i) { return row_at(at + i); }, in_units, tile);
    __syncthreads();
    // Computes the logits of each row and, with moments, its value's squared norm and projection.
    const int tasks = shape.rows + (kMoments ? 1 + kProjectionDims / 4 : 0);
    for (int i = threadIdx.x; i < m * tasks; i += blockDim.x) {
      const int row = i % m;
      const int r = i / m;
      const float* k = tile + row * stride;
      if (kMoments && r == shape.rows) {
        norms[row] = Dot(k + d, k + d, d);
        continue;
      }
      if (kMoments && r > shape.rows) {
        const int quad = r - shape.rows - 1;
        *reinterpret_cast<float4*>(projections + row * kProjectionStride + 4 * quad) =
            ProjectFour(k + d, d, quad, *shape.signs);
        continue;
      }
      float l = -INFINITY;
      if (visible(r, at + row)) {
        l = Dot(k, queries + r * d, d);
        if (!isfinite(l)) bad(at + row);
        l = weigh(r, at + row, k, l);
      }
      weights[row * kRows + r] = l;
    }
    __syncthreads();
    // One warp per query row: maxima and sums.
    __shared__ float keep[kRows];
    for (int r = warp; r < kRows; r += warps) {
      if (r >= shape.rows) {
        for (int row = lane; row < m; row += 32) {
          weights[row * kRows + r] = 0;
          if (kMoments) squares[row * kRows + r] = 0;
        }
        if (lane == 0) keep[r] = 0;
        continue;
      }
      const float l = lane < m ? weights[lane * kRows + r] : -INFINITY;
      const float old = sums[r].max;
      const float max = fmaxf(WarpMax(l), old);
      const float x = l == -INFINITY ? 0.0f : ExpF32(l - max);
      if (lane < m) {
        weights[lane * kRows + r] = x;
        if (kMoments) squares[lane * kRows + r] = x * x;
      }
      const float sum = WarpSum(x);
      const float sum_sq = kMoments ? WarpSum(x * x) : 0;
      const float sum_sq_norm = kMoments ? WarpSum(lane < m ? x * x * norms[lane] : 0.0f) : 0;
      __syncwarp();  // all have read the old maximum
      if (lane == 0) keep[r] = sums[r].Merge({max, sum, sum_sq, sum_sq_norm}).keep;
    }
    __syncthreads();
    if (threadIdx.x < d) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        values.value[r] *= keep[r];
        if (kMoments) values.value_sq[r] *= keep[r] * keep[r];
      }
#pragma unroll 4
      for (int row = 0; row < m; ++row) {
        const float v = tile[row * stride + d + threadIdx.x];
        float x[kRows];
        LoadOfRows(weights + row * kRows, x);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float xv = x[r] * v;
          values.value[r] += xv;
          if (kMoments) values.value_sq[r] = fmaf(x[r], xv, values.value_sq[r]);
        }
      }
    }
    if (kMoments && threadIdx.x < kProjectedPairs) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) values.projected[r] *= keep[r] * keep[r];
      const int a = threadIdx.x % kProjectionDims;
      const int b = (a + threadIdx.x / kProjectionDims) % kProjectionDims;
#pragma unroll 4
      for (int row = 0; row < m; ++row) {
        const float* y = projections + row * kProjectionStride;
        const float product = y[a] * y[b];
        float square[kRows];
        LoadOfRows(squares + row * kRows, square);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          values.projected[r] = fmaf(square[r], product, values.projected[r]);
        }
      }
    }
  }
}

// What a fold uses in place of logits: here the logits themselves. The launch passes `Context`.
// kGathered: whether a gather has noted that the stage begins.
struct PlainLogits {
  static constexpr bool kGathered = true;
  struct Context {};
  __device__ explicit PlainLogits(const Context&) {}
  // For query head `head` and the row at `place` of the unit's list. key: [d].
  __device__ float operator()(const AttendShape&, const UnitRequest&, int, int64_t, const float*,
                              float logit) const {
    return logit;
  }
};

// Folds the splits of a phase of a sparse attend: without moments those of exact rows. Grid
// (blocks, units). Shared memory: FoldFloats().
template <int kRows, typename Weigh>
__global__ void FoldKernel(AttendShape shape, typename Weigh::Context context, int phase,
                           const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  __shared__ SoftmaxSums sums[kRows];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  if constexpr (!Weigh::kGathered) NoteMoment(u.result, kSampleFoldBegins);
  UnitState& state = *u.state;
  const int d = shape.head_dim;
  if (blockIdx.x >= state.split_count[phase] || (phase > 0 && u.coded())) return;
  float* queries = memory;
  float* rest = queries + kRows * d;
  for (int i = threadIdx.x; i < shape.group * d; i += blockDim.x) {
    queries[i] = u.q[i] * shape.scale;
  }
  const Weigh weigh(context);
  const FoldShape fold = {shape.format(), d, shape.group, 1 / ValueUnit(u), &u.signs};
  // A tile of head_dim 128 in 16 bits is loaded in one go: rows may be across the link.
  constexpr int kInFlight = 7;
  const auto run = [&]<bool kMoments>(const KvSplit& split, float* out) {
    ValueSums<kRows, kMoments> values;
    FoldRows<kRows, kMoments, kInFlight>(
        fold, split.count, [&](int64_t j) { return u.sources[split.first + j]; },
        [](int, int64_t) { return true; },
        [&](int64_t j) { atomicMin(&state.error_token, u.list[split.first + j]); },
        [&](int r, int64_t j, const float* k, float l) {
          return weigh(shape, u, r, split.first + j, k, l);
        },
        queries, rest, sums, values);
    __syncthreads();
    if (threadIdx.x < shape.group) {
      reinterpret_cast<SoftmaxSums*>(out)[threadIdx.x] = sums[threadIdx.x];
    }
    float* value = out + kSumsFloats * shape.group;
    float* value_sq = value + shape.group * d;
    float* projected = value_sq + shape.group * d;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= shape.group) break;
      if (threadIdx.x < d) {
        value[r * d + threadIdx.x] = values.value[r];
        if (kMoments) value_sq[r * d + threadIdx.x] = values.value_sq[r];
      }
      if (kMoments && threadIdx.x < kProjectedPairs) {
        projected[r * kProjectedPairs + threadIdx.x] = values.projected[r];
      }
    }
    __syncthreads();
  };
  for (int i = blockIdx.x; i < state.split_count[phase]; i += gridDim.x) {
    const KvSplit split = state.splits[phase][i];
    if (threadIdx.x < kRows) sums[threadIdx.x] = SoftmaxSums::Empty();
    float* out = u.partials + (int64_t{phase} * kSplitMax + i) * PartialFloats(shape.group, d);
    // Exact rows have no spread.
    if (split.set == 0) {
      run.template operator()<false>(split, out);
    } else {
      run.template operator()<true>(split, out);
    }
  }
}

}  // namespace spillway::cuda
