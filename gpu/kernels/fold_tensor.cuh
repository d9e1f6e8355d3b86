#pragma once

#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/tensor_product.cuh"

// Folds rows of 16 bits on tensor cores: the same sums as FoldRows(). Keys and values stay in 16
// bits. Queries, weights x and their squares are split in terms of 16 bits, so that products are as
// exact as those of fp32; weights of second moments have 16 bits. Sums are in fp32, and cut where
// FoldRows() rounds. The order of every sum depends on the split alone.
namespace spillway::cuda {

inline constexpr int kTensorThreads = 128;
inline constexpr int kTensorTileRows = 32;
// Blocks that a multiprocessor runs at once, if they fit: with moments, and without.
inline constexpr int kMomentBlocksPerSm = 4;
inline constexpr int kPlainBlocksPerSm = 5;
// Terms of the weights of second moments, and of projected values.
inline constexpr int kMomentTerms = 2;

// Shared memory of a block, in bytes from its beginning. Queries and weights are 16 bytes longer
// than their elements, so that the eight rows that lanes read together are in other banks. For that
// rows of tiles have their 16-byte chunks in another order in each of eight rows, and stay aligned
// to lines: a copy of 128 bytes that ends in two lines of shared memory may be made by two
// requests.
//
// A tile of rows of 8 bits is decoded from copies of the rows, which are of two tiles; else there
// are two tiles.
template <DType kDType>
struct TensorLayout {
  int row_stride;    // of tiles of keys and values
  int query_stride;  // of queries [terms][rows]
  static constexpr int kLineBytes = 128;
  static constexpr int kWeightStride = 2 * kTensorTileRows + 16;  // of weights [terms][heads]
  int tiles, copies, queries, logits, weights, square_weights, squares, projections, norms, end;

  // Without moments, nothing is behind the weights.
  __host__ __device__ TensorLayout(int head_dim, int heads, int rows, bool moments, RowType type) {
    row_stride = (4 * head_dim + kLineBytes - 1) / kLineBytes * kLineBytes;
    query_stride = 2 * head_dim + 16;
    tiles = 0;
    copies = tiles + (type == RowType::kInt8 ? 1 : 2) * kTensorTileRows * row_stride;
    queries = copies + (type == RowType::kInt8 ? 2 * kTensorTileRows * Int8RowBytes(head_dim) : 0);
    logits = queries + kFloatTerms<kDType> * rows * query_stride;
    weights = logits + 2 * kTensorTileRows * heads * int{sizeof(float)};
    square_weights = weights + kFloatTerms<kDType> * heads * kWeightStride;
    squares = square_weights + kMomentTerms * heads * kWeightStride;
    projections = squares + heads * kTensorTileRows * int{sizeof(float)};
    norms = projections + kTensorTileRows * kProjectionStride * int{sizeof(float)};
    end = moments ? norms + kTensorTileRows * int{sizeof(float)} : square_weights;
  }
  // Where chunk `chunk` of row `row` is in a tile. row_in_8: row % 8, which callers know.
  __host__ __device__ int Chunk(int row, int row_in_8, int chunk) const {
    return row * row_stride + (chunk ^ row_in_8) * 16;
  }
};

// Whether rows can be folded on tensor cores.
__host__ __device__ inline bool TensorFolds(DType dtype, int head_dim) {
  return dtype != DType::kF32 && head_dim % 16 == 0;
}

struct TensorFoldShape {
  int head_dim;
  int rows;  // query rows in use, <= kHeads
  float scale;
  // Values are multiplied by inverse_unit and, with moments, projected.
  float inverse_unit = 1;
  const ProjectionSigns* signs = nullptr;
};

// Splits begin, begin + step, ... below end.
struct SplitRange {
  int begin;
  int end;
  int step;
};

// Folds splits of a source. A block of kTensorThreads has one tile at a time, and the rows of the
// next are on their way. kHeads: 8 or 16. kDimTiles: of 64 dimensions each, at least head_dim.
// memory: TensorLayout. A source has:
//   kMoments                     whether a split may have moments
//   At(split)                    its rows, as KvSplit
//   HasMoments(split)            given as KvSplit
//   Row(split, i)                the address of row i
//   Visible(r, split, i)         whether query row r sees it
//   Bad(split, i)                called for a visible logit that is not finite
//   Query(r, i)                  element i of query row r, not scaled
//   Stops()                      whether to fold no further split; thread 0 calls it
//   Out(split, r, sums)          takes the sums of a query row
//   Values(split)                where sums x v [rows][d] go
//   ValuesSquared(split)         with moments: sums x^2 v [rows][d]
//   Pairs(split)                 with moments: sums x^2 y_a y_b [rows][kProjectedPairs]
template <DType kDType, int kHeads, int kDimTiles, RowType kType, typename Source>
__device__ inline void FoldOnTensorCores(const TensorFoldShape& shape, const Source& source,
                                         const SplitRange& splits, std::byte* memory) {
  constexpr int kWarps = kTensorThreads / 32;
  constexpr int kHeadTiles = kHeads / 8;
  constexpr int kTerms = kFloatTerms<kDType>;
  constexpr int kWarpHeads = kHeads / kWarps;
  static_assert(kTensorThreads == 4 * kTensorTileRows && kProjectionDims == 16);
  __shared__ SoftmaxSums sums[kHeads];
  __shared__ float keep[kHeads];
  // Queries of f16 are divided by this, so that their terms are in f16's range.
  __shared__ float query_unit[kHeads];
  __shared__ bool stop;
  const int split_end = splits.end;
  int split_index = splits.begin;
  if (split_index >= split_end) return;
  const int d = shape.head_dim;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const TensorLayout<kDType> at(d, kHeads, shape.rows, Source::kMoments, kType);
  auto* const logits = reinterpret_cast<float*>(memory + at.logits);    // [2][rows][heads]
  auto* const squares = reinterpret_cast<float*>(memory + at.squares);  // [heads][rows]
  auto* const projections = reinterpret_cast<float*>(memory + at.projections);
  auto* const norms = reinterpret_cast<float*>(memory + at.norms);
  const float inverse_unit = shape.inverse_unit;
  // Values of bf16 may overflow sums before they are in units, so the weights are. Those of f16
  // cannot, and their weights are in the upper part of f16's range instead, so that small ones keep
  // their bits.
  constexpr float kF16Weight = 32768;
  const float weight_unit = kDType == DType::kBF16 ? inverse_unit : kF16Weight;
  const float sum_unit = kDType == DType::kBF16 ? 1.0f : inverse_unit / kF16Weight;

  // Tiles follow each other across splits.
  KvSplit split = source.At(split_index);
  KvSplit ahead = split;  // of the tile that is brought next
  int ahead_index = split_index;
  int ahead_first = 0;
  // The 16-byte chunks of a tile that this thread copies: every kTensorThreads-th one. Only here is
  // anything divided by a number that the compiler does not know.
  constexpr bool kDecodes = kType == RowType::kInt8;
  const int chunks = kDecodes ? Int8RowBytes(d) / 16 : d / 4;  // in a row
  const int first_row = static_cast<int>(threadIdx.x) / chunks;
  const int first_chunk = static_cast<int>(threadIdx.x) % chunks;
  const int row_step = kTensorThreads / chunks;
  const int chunk_step = kTensorThreads % chunks;
  // The address of the lane's row in the tile that is brought next: each lane looks up one row, and
  // does so while the tile before is folded.
  static_assert(kTensorTileRows == 32);
  uint64_t next_row = 0;
  const auto look_up = [&] {
    if (ahead_index >= split_end) return;
    const int last = min(kTensorTileRows, ahead.count - ahead_first) - 1;
    next_row = reinterpret_cast<uint64_t>(source.Row(ahead, ahead_first + min(lane, last)));
  };
  look_up();
  const auto bring = [&](int stage) {
    if (ahead_index < split_end) {
      const int count = min(kTensorTileRows, ahead.count - ahead_first);
      std::byte* const tile =
          memory + (kDecodes ? at.copies + stage * kTensorTileRows * chunks * 16
                             : at.tiles + stage * kTensorTileRows * at.row_stride);
      // All lanes make as many rounds: of rows that are not decoded, a tile's chunks are a multiple
      // of kTensorThreads.
      const int rounds = (kTensorTileRows * chunks + kTensorThreads - 1) / kTensorThreads;
      int row = first_row, chunk = first_chunk;
#pragma unroll 4
      for (int round = 0; round < rounds; ++round) {
        const uint64_t from = __shfl_sync(kFullWarp, next_row, row) + chunk * 16;
        const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(
            tile + (kDecodes ? (row * chunks + chunk) * 16 : at.Chunk(row, row % 8, chunk))));
        // Rows that are not there become zeros.
        if (!kDecodes || row < kTensorTileRows) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                       "r"(row < count ? 16 : 0)
                       : "memory");
        }
        row += row_step;
        chunk += chunk_step;
        if (chunk >= chunks) {
          chunk -= chunks;
          ++row;
        }
      }
      ahead_first += kTensorTileRows;
      if (ahead_first >= ahead.count) {
        ahead_first = 0;
        ahead_index += splits.step;
        if (ahead_index < split_end) ahead = source.At(ahead_index);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    look_up();
  };
  bring(0);

  // The queries' terms. All elements of a lane are loaded before one is used, so that the latency
  // is paid once.
  constexpr int kLaneElements = 2 * kDimTiles;
  float query[kWarpHeads][kLaneElements];
#pragma unroll
  for (int j = 0; j < kWarpHeads; ++j) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int h = warp + j * kWarps;
      const int i = lane + e * 32;
      query[j][e] = h < shape.rows && i < d ? source.Query(h, i) * shape.scale : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < kWarpHeads; ++j) {
    const int h = warp + j * kWarps;
    const bool in_use = h < shape.rows;
    float unit = 1;
    if (kDType == DType::kF16 && in_use) {
      float largest = 0;
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e) largest = fmaxf(largest, fabsf(query[j][e]));
      unit = F16Unit(WarpMax(largest));
    }
    if (lane == 0) query_unit[h] = unit;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int i = lane + e * 32;
      if (!in_use || i >= d) break;
      float x = query[j][e] / unit;
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        *reinterpret_cast<uint16_t*>(memory + at.queries + (t * shape.rows + h) * at.query_stride +
                                     2 * i) = TakeTerm<kDType>(x);
      }
    }
  }

  // Sums of this warp: of dimensions [16 (warp + kWarps m), + 16), by tile of heads; and of its
  // heads' projected values.
  float value[kDimTiles][kHeadTiles][4], value_sq[kDimTiles][kHeadTiles][4];
  float projected[kWarpHeads][2][4];
  int first = 0;  // of the split's rows, in this tile
  for (int stage = 0; split_index < split_end; stage ^= 1) {
    const bool moments = Source::kMoments && source.HasMoments(split);
    const int count = min(kTensorTileRows, split.count - first);
    std::byte* const tile =
        memory + at.tiles + (kDecodes ? 0 : stage * kTensorTileRows * at.row_stride);
    if (first == 0) {
      if (threadIdx.x == 0) stop = source.Stops();
      if (threadIdx.x < kHeads) sums[threadIdx.x] = SoftmaxSums::Empty();
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) value[m][n][e] = value_sq[m][n][e] = 0;
        }
      }
#pragma unroll
      for (int h = 0; h < kWarpHeads; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) projected[h][0][e] = projected[h][1][e] = 0;
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (stop) return;
    bring(stage ^ 1);
    if constexpr (kDecodes) {
      // Four lanes a row.
      const int row = static_cast<int>(threadIdx.x) / 4;
      const auto eight_at = [&](int i) { return tile + at.Chunk(row, row % 8, i); };
      DecodeInt8Row(
          d, memory + at.copies + (stage * kTensorTileRows + row) * chunks * 16,
          static_cast<int>(threadIdx.x) % 4, 4,
          [&](int i, float4 low, float4 high) { StoreEight(kDType, low, high, 0, eight_at(i)); },
          [&](int i, float x) { StoreRounded(kDType, x, i % 8, eight_at(i / 8)); });
      __syncthreads();
    }

    // Logits: 16 rows a warp, over half of the dimensions.
    {
      const int row = warp % 2 * 16;
      const int half = warp / 2;
      float sum[kHeadTiles][2][4] = {};  // of the first term, and of the others
      for (int k = half; k < d / 16; k += 2) {
        uint32_t a[4];
        LoadMatrix(a, tile + at.Chunk(row + lane % 16, lane % 8, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int t = 0; t < kTerms; ++t) {
            const auto* b = reinterpret_cast<const uint32_t*>(
                memory + at.queries +
                (t * shape.rows + min(n * 8 + lane / 4, shape.rows - 1)) * at.query_stride +
                k * 32 + lane % 4 * 4);
            MultiplyAdd<kDType>(sum[n][t > 0], a, b[0], b[4]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        float* const to =
            logits + (half * kTensorTileRows + row + lane / 4) * kHeads + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) =
            make_float2(sum[n][0][0] + sum[n][1][0], sum[n][0][1] + sum[n][1][1]);
        *reinterpret_cast<float2*>(to + 8 * kHeads) =
            make_float2(sum[n][0][2] + sum[n][1][2], sum[n][0][3] + sum[n][1][3]);
      }
    }
    // Of each row's value: elements [4 quad, 4 quad + 4) of the projection, and ||v||^2.
    if (moments) {
      const int row = threadIdx.x / 4;
      const int quad = threadIdx.x % 4;
      float4 y = make_float4(0, 0, 0, 0);
      float norm = 0;
#pragma unroll 4
      for (int i = 4 * quad; i < d; i += kProjectionDims) {
        float4 x = LoadFour(kDType, tile + at.Chunk(row, row % 8, (d + i) / 8), i / 4 % 2);
        x = make_float4(x.x * inverse_unit, x.y * inverse_unit, x.z * inverse_unit,
                        x.w * inverse_unit);
        y.x += shape.signs->Of(i, x.x);
        y.y += shape.signs->Of(i + 1, x.y);
        y.z += shape.signs->Of(i + 2, x.z);
        y.w += shape.signs->Of(i + 3, x.w);
        norm = fmaf(x.x, x.x, norm);
        norm = fmaf(x.y, x.y, norm);
        norm = fmaf(x.z, x.z, norm);
        norm = fmaf(x.w, x.w, norm);
      }
      *reinterpret_cast<float4*>(projections + row * kProjectionStride + 4 * quad) = y;
      norm += __shfl_xor_sync(kFullWarp, norm, 1);
      norm += __shfl_xor_sync(kFullWarp, norm, 2);
      if (quad == 0) norms[row] = norm;
    }
    __syncthreads();

    // One warp per query head, one lane per row: maxima, sums and weights.
    for (int h = warp; h < kHeads; h += kWarps) {
      const bool there = lane < count && h < shape.rows;
      float l = -INFINITY;
      if (there && source.Visible(h, split, first + lane)) {
        l = (logits[lane * kHeads + h] + logits[(kTensorTileRows + lane) * kHeads + h]) *
            query_unit[h];
        if (!isfinite(l)) source.Bad(split, first + lane);
      }
      const float old = sums[h].max;
      const float max = fmaxf(WarpMax(l), old);
      const float x = l == -INFINITY ? 0.0f : ExpF32(l - max);
      const float sum = WarpSum(x);
      const float sum_sq = moments ? WarpSum(x * x) : 0;
      const float sum_sq_norm = moments ? WarpSum(there ? x * x * norms[lane] : 0.0f) : 0;
      if (h < shape.rows) {
        __syncwarp();  // all have read the old maximum
        if (lane == 0) keep[h] = sums[h].Merge({max, sum, sum_sq, sum_sq_norm}).keep;
      } else if (lane == 0) {
        keep[h] = 0;
      }
      float weight = x * weight_unit;
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        *reinterpret_cast<uint16_t*>(memory + at.weights + (t * kHeads + h) * at.kWeightStride +
                                     2 * lane) = TakeTerm<kDType>(weight);
      }
      if (!moments) continue;
      float square = x * x * weight_unit;
#pragma unroll
      for (int t = 0; t < kMomentTerms; ++t) {
        *reinterpret_cast<uint16_t*>(memory + at.square_weights +
                                     (t * kHeads + h) * at.kWeightStride + 2 * lane) =
            TakeTerm<kDType>(square);
      }
      squares[h * kTensorTileRows + lane] = x * x;
    }
    __syncthreads();

    // Sums of x v and x^2 v.
    float kept[kHeadTiles][2];
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      kept[n][0] = keep[n * 8 + lane % 4 * 2];
      kept[n][1] = keep[n * 8 + lane % 4 * 2 + 1];
    }
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
      const int first_dim = (warp + kWarps * m) * 16;
      if (first_dim >= d) break;
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          value[m][n][e] *= kept[n][e % 2];
          value_sq[m][n][e] *= kept[n][e % 2] * kept[n][e % 2];
        }
      }
#pragma unroll
      for (int k = 0; k < kTensorTileRows / 16; ++k) {
        if (k * 16 >= count) break;
        uint32_t a[4];
        LoadTransposed(a, tile + at.Chunk(k * 16 + lane % 8 + lane / 16 * 8, lane % 8,
                                          (d + first_dim) / 8 + lane / 8 % 2));
        const auto weights_at = [&](int base, int t, int n) {
          return reinterpret_cast<const uint32_t*>(
              memory + base + (t * kHeads + n * 8 + lane / 4) * at.kWeightStride + k * 32 +
              lane % 4 * 4);
        };
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int t = 0; t < kTerms; ++t) {
            const uint32_t* b = weights_at(at.weights, t, n);
            MultiplyAdd<kDType>(value[m][n], a, b[0], b[4]);
          }
#pragma unroll
          for (int t = 0; t < kMomentTerms && moments; ++t) {
            const uint32_t* b = weights_at(at.square_weights, t, n);
            MultiplyAdd<kDType>(value_sq[m][n], a, b[0], b[4]);
          }
        }
      }
    }
    // Sums of x^2 y_a y_b: of each head, y times x^2, transposed, by y.
    if (moments) {
#pragma unroll
      for (int h = 0; h < kWarpHeads; ++h) {
        const int head = warp + kWarps * h;
        const float factor = keep[head] * keep[head];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          projected[h][0][e] *= factor;
          projected[h][1][e] *= factor;
        }
      }
#pragma unroll
      for (int k = 0; k < kTensorTileRows / 16; ++k) {
        if (k * 16 >= count) break;
        const int row = k * 16 + lane % 4 * 2;
        constexpr int kRowOf[4] = {0, 1, 8, 9};
        float y[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const of_row =
              projections + (row + kRowOf[j]) * kProjectionStride + lane / 4;
          y[j][0] = of_row[0];
          y[j][1] = of_row[8];
        }
        uint32_t b[2][2][2];  // term, tile of columns, pair
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            float low = y[2 * pair][n], high = y[2 * pair + 1][n];
            b[0][n][pair] = TakeTerms<DType::kBF16>(low, high);
            b[1][n][pair] = TakeTerms<DType::kBF16>(low, high);
          }
        }
#pragma unroll
        for (int h = 0; h < kWarpHeads; ++h) {
          const int head = warp + kWarps * h;
          if (head >= shape.rows) break;
          const float* const square = squares + head * kTensorTileRows + row;
          uint32_t a[2][4];
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            // Pairs of rows 0 and 1, then 8 and 9; of columns lane / 4, then + 8.
            const int j = part / 2 * 2;
            float low = square[kRowOf[j]] * y[j][part % 2];
            float high = square[kRowOf[j + 1]] * y[j + 1][part % 2];
            a[0][part] = TakeTerms<DType::kBF16>(low, high);
            a[1][part] = TakeTerms<DType::kBF16>(low, high);
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            MultiplyAdd<DType::kBF16>(projected[h][n], a[0], b[0][n][0], b[0][n][1]);
            MultiplyAdd<DType::kBF16>(projected[h][n], a[0], b[1][n][0], b[1][n][1]);
            MultiplyAdd<DType::kBF16>(projected[h][n], a[1], b[0][n][0], b[0][n][1]);
          }
        }
      }
    }

    first += kTensorTileRows;
    if (first < split.count) continue;
    // The split's sums.
    if (threadIdx.x < shape.rows) {
      source.Out(split_index, static_cast<int>(threadIdx.x), sums[threadIdx.x]);
    }
    float* const values = source.Values(split_index);
    float* const values_sq = moments ? source.ValuesSquared(split_index) : nullptr;
    float* const pairs = moments ? source.Pairs(split_index) : nullptr;
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
      const int dim = (warp + kWarps * m) * 16 + lane / 4;
      if (dim >= d) break;
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = n * 8 + lane % 4 * 2 + e % 2;
          if (head >= shape.rows) continue;
          const int to = head * d + dim + e / 2 * 8;
          values[to] = value[m][n][e] * sum_unit;
          if (moments) values_sq[to] = value_sq[m][n][e] * sum_unit;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kWarpHeads && moments; ++h) {
      const int head = warp + kWarps * h;
      if (head >= shape.rows) break;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int a = lane / 4 + e / 2 * 8;
          const int b = n * 8 + lane % 4 * 2 + e % 2;
          const int apart = (b - a) & (kProjectionDims - 1);
          const int pair = apart * kProjectionDims + a;
          if (pair < kProjectedPairs) pairs[head * kProjectedPairs + pair] = projected[h][n][e];
        }
      }
    }
    first = 0;
    split_index += splits.step;
    if (split_index < split_end) split = source.At(split_index);
  }
}

// The splits of a phase of a sparse attend: without moments those of exact rows.
struct ListedRows {
  static constexpr bool kMoments = true;
  const AttendShape& shape;
  const UnitRequest& u;
  UnitState& state;
  int phase;

  __device__ KvSplit At(int split) const { return state.splits[phase][split]; }
  __device__ bool HasMoments(const KvSplit& split) const { return split.set != 0; }
  __device__ const std::byte* Row(const KvSplit& split, int i) const {
    return u.sources[split.first + i];
  }
  __device__ bool Visible(int, const KvSplit&, int) const { return true; }
  __device__ void Bad(const KvSplit& split, int i) const {
    atomicMin(&state.error_token, u.list[split.first + i]);
  }
  __device__ float Query(int r, int i) const { return u.q[r * shape.head_dim + i]; }
  __device__ bool Stops() const { return false; }
  __device__ float* Partial(int split) const {
    return u.partials +
           (int64_t{phase} * kSplitMax + split) * PartialFloats(shape.group, shape.head_dim);
  }
  __device__ void Out(int split, int r, const SoftmaxSums& sums) const {
    reinterpret_cast<SoftmaxSums*>(Partial(split))[r] = sums;
  }
  __device__ float* Values(int split) const { return Partial(split) + kSumsFloats * shape.group; }
  __device__ float* ValuesSquared(int split) const {
    return Values(split) + shape.group * shape.head_dim;
  }
  __device__ float* Pairs(int split) const {
    return ValuesSquared(split) + shape.group * shape.head_dim;
  }
};

// Folds the splits of a phase of a sparse attend. Grid (blocks, units). Shared memory:
// TensorLayout.
template <DType kDType, int kHeads, int kDimTiles, RowType kType>
__global__ void __launch_bounds__(kTensorThreads, kDimTiles <= 2 ? kMomentBlocksPerSm : 1)
    FoldTensorKernel(AttendShape shape, int phase, const UnitRequest* units) {
  extern __shared__ __align__(128) std::byte fold_memory[];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  if (phase > 0 && u.coded()) return;
  const ListedRows rows{shape, u, *u.state, phase};
  FoldOnTensorCores<kDType, kHeads, kDimTiles, kType>(
      {shape.head_dim, shape.group, shape.scale, 1 / ValueUnit(u), &u.signs}, rows,
      {static_cast<int>(blockIdx.x), u.state->split_count[phase], static_cast<int>(gridDim.x)},
      fold_memory);
}

}  // namespace spillway::cuda
