#pragma once

#include "gpu/kernels/dense.cuh"

// Exact attention over rows of 16 bits for up to eight query rows, by warps that share nothing:
// each has splits of its own, brings their rows into its own part of shared memory, and keeps
// queries, sums and outputs in registers. So no barrier stands between a warp and its next rows.
//
// The rows of a long unit's split are in two or four runs, whose sums are merged in order. Where a
// wave has so few splits that they leave most warps idle, each warp of a block folds a run, and the
// sums have the same bits.
namespace spillway::cuda {

inline constexpr int kDenseWarps = 4;  // of a block
inline constexpr int kDenseWarpBlocksPerSm = 2;
// Rows that a warp folds at once, and brings at once.
inline constexpr int kWarpRows = 16;
static_assert(kTensorTileRows % kWarpRows == 0);

// Runs of a split of a unit with n rows. At least some 64 rows in each.
__device__ inline int RunsOfSplit(int64_t n) {
  constexpr int64_t kRowsOfTwo = 16384;
  return n < kRowsOfTwo ? 1 : n < 2 * kRowsOfTwo ? 2 : kDenseWarps;
}
// Where run `run` of a split with `count` rows begins, of `runs`; with run = runs, its end.
__device__ inline int RunBegin(int count, int run, int runs) {
  const int steps = (count + kWarpRows - 1) / kWarpRows;
  return min(count, steps * run / runs * kWarpRows);
}

// Stages of a warp, each with kWarpRows rows: one is folded, the others are under way.
__host__ __device__ constexpr int WarpStages(int head_dim) { return 384 / head_dim; }
// Shared memory of a block.
__host__ __device__ constexpr int DenseWarpBytes(int head_dim) {
  return kDenseWarps * WarpStages(head_dim) * kWarpRows * 4 * head_dim;
}
// The queries of a unit as columns of B, in terms of 16 bits; see tensor_product.cuh. They are not
// scaled, so that those of 16 bits are one term.
template <DType kDType, int kDim>
struct WarpQueries {
  static constexpr int kTerms = kFloatTerms<kDType>;
  static constexpr int kSteps = kDim / 16;
  uint32_t pairs[kTerms][kSteps][2];
  bool more;        // whether any needs more than one term
  float factor[2];  // of the logits in D's columns c and c + 1

  // Reads the elements of one query that a lane has.
  template <DType kOf>
  __device__ static void Read(const std::byte* q, float (&x)[kSteps][4]) {
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[k][e] = LoadElement(kOf, q, k * 16 + first + e % 2 + e / 2 * 8);
      }
    }
  }
  __device__ void Load(const DenseRows& rows) {
    const int lane = threadIdx.x % 32;
    const int head = lane / 4;
    const bool in_use = head < rows.u.query_rows;
    float x[kSteps][4] = {};
    float largest = 0;
    if (in_use) {
      DType dtype;
      const std::byte* const q = rows.QueryAddress(head, dtype);
      if (dtype == DType::kF32) {
        Read<DType::kF32>(q, x);
      } else if (dtype == DType::kF16) {
        Read<DType::kF16>(q, x);
      } else {
        Read<DType::kBF16>(q, x);
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[k][e]));
    }
    float unit = 1;
    if (kDType == DType::kF16) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
      unit = F16Unit(largest);
    }
    bool rest = false;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float low = x[k][2 * pair] / unit;
        float high = x[k][2 * pair + 1] / unit;
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          pairs[t][k][pair] = TakeTerms<kDType>(low, high);
          if (t == 0) rest |= low != 0 || high != 0;
        }
      }
    }
    more = __any_sync(kFullWarp, rest);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factor[e] = __shfl_sync(kFullWarp, unit, (lane % 4 * 2 + e) * 4) * rows.wave.scale;
    }
  }
};

// Brings the rows of splits into a warp's stages, in the order in which they are folded.
template <int kDim>
class WarpTiles {
 public:
  static constexpr int kStages = WarpStages(kDim);
  static constexpr int kRowBytes = 4 * kDim;
  static constexpr int kStageBytes = kWarpRows * kRowBytes;

  // The rows of runs [first_run, last_run) of `runs` of each split.
  __device__ WarpTiles(const DenseRows& rows, const SplitRange& splits, int first_run, int last_run,
                       int runs, std::byte* stages)
      : rows_(rows),
        splits_(splits),
        first_run_(first_run),
        last_run_(last_run),
        runs_(runs),
        stages_(stages) {
    Open();
    LookUp();
#pragma unroll
    for (int s = 0; s + 1 < kStages; ++s) Bring();
  }
  // Waits for the rows that are folded next, and returns where they are. The stage before them is
  // free, and gets the rows that have none yet.
  __device__ std::byte* Next() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();
    std::byte* const tile = stages_ + folded_ * kStageBytes;
    folded_ = folded_ + 1 < kStages ? folded_ + 1 : 0;
    Bring();
    return tile;
  }
  // Where a 16-byte chunk of a row is in a stage. Chunks have another order in each of eight rows,
  // so that eight lanes that read a chunk of a row each are in other banks.
  __device__ static int Chunk(int row, int chunk) {
    return row * kRowBytes + (chunk ^ row % 8) * 16;
  }

 private:
  // Goes to the next split with rows, from splits_.begin on.
  __device__ void Open() {
    for (; splits_.begin < splits_.end; splits_.begin += splits_.step) {
      split_ = rows_.At(splits_.begin);
      first_ = RunBegin(split_.count, first_run_, runs_);
      end_ = RunBegin(split_.count, last_run_, runs_);
      if (first_ < end_) return;
    }
  }
  // The address of the next rows, which lie side by side, is looked up one stage ahead.
  __device__ void LookUp() {
    if (splits_.begin < splits_.end) next_ = rows_.Row(split_, first_);
  }
  __device__ void Bring() {
    if (splits_.begin < splits_.end) {
      constexpr int kChunks = kRowBytes / 16;
      constexpr int kRowsAtOnce = 32 / kChunks;
      const int lane = threadIdx.x % 32;
      const int count = min(kWarpRows, end_ - first_);
      const std::byte* const from = next_ + lane * 16;
      const auto to =
          static_cast<uint32_t>(__cvta_generic_to_shared(stages_ + brought_ * kStageBytes));
#pragma unroll
      for (int j = 0; j < kWarpRows / kRowsAtOnce; ++j) {
        const int row = j * kRowsAtOnce + lane / kChunks;
        // Rows that are not there become zeros.
        const bool there = row < count;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + Chunk(row, lane % kChunks)),
            "l"(there ? from + j * 512 : from), "r"(there ? 16 : 0)
            : "memory");
      }
      first_ += kWarpRows;
      if (first_ >= end_) {
        splits_.begin += splits_.step;
        Open();
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    brought_ = brought_ + 1 < kStages ? brought_ + 1 : 0;
    LookUp();
  }

  const DenseRows& rows_;
  SplitRange splits_;  // begins with the one whose rows are brought next
  const int first_run_;
  const int last_run_;
  const int runs_;
  std::byte* const stages_;
  KvSplit split_;
  int first_ = 0;  // of its rows, the one that is brought next
  int end_ = 0;    // of its rows that are brought
  int brought_ = 0;
  int folded_ = 0;
  const std::byte* next_ = nullptr;
};

// The sums of a split. Lane l has those of query rows c and c + 1, where c = 2 (l % 4): their
// maxima, the sums of x over its own rows, and of x v elements 16 m + l / 4 and + 8.
template <DType kDType, int kDim>
struct WarpSums {
  static constexpr int kDimTiles = kDim / 16;
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
  float value[kDimTiles][4] = {};

  // Adds rows with logits l, in D's order, and the values behind the keys of a tile.
  __device__ void Add(const float (&l)[4], const std::byte* tile, float weight_unit) {
    const int lane = threadIdx.x % 32;
    float keep[2];
    float weight[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float most = fmaxf(l[e], l[e + 2]);
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, apart));
      }
      most = fmaxf(most, max[e]);
      keep[e] = SoftmaxFactor(max[e], most);
      max[e] = most;
      const float low = l[e] == -INFINITY ? 0.0f : ExpF32(l[e] - most);
      const float high = l[e + 2] == -INFINITY ? 0.0f : ExpF32(l[e + 2] - most);
      sum[e] = fmaf(sum[e], keep[e], low + high);
      weight[e] = low * weight_unit;
      weight[e + 2] = high * weight_unit;
    }
    if (__any_sync(kFullWarp, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[m][e] *= keep[e % 2];
      }
    }
    uint32_t b[kFloatTerms<kDType>][2];
#pragma unroll
    for (int t = 0; t < kFloatTerms<kDType>; ++t) {
      b[t][0] = Transposed(TakeTerms<kDType>(weight[0], weight[1]));
      b[t][1] = Transposed(TakeTerms<kDType>(weight[2], weight[3]));
    }
    const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
      uint32_t a[4];
      LoadTransposed(a, tile + WarpTiles<kDim>::Chunk(row, kDim / 8 + 2 * m + lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < kFloatTerms<kDType>; ++t) {
        MultiplyAdd<kDType>(value[m], a, b[t][0], b[t][1]);
      }
    }
  }

  // Adds the sums of a later run.
  __device__ void Merge(const WarpSums& other) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float most = fmaxf(max[e], other.max[e]);
      const float keep = SoftmaxFactor(max[e], most);
      const float take = SoftmaxFactor(other.max[e], most);
      max[e] = most;
      sum[e] = fmaf(other.sum[e], take, sum[e] * keep);
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
        value[m][e] = fmaf(other.value[m][e], take, value[m][e] * keep);
        value[m][e + 2] = fmaf(other.value[m][e + 2], take, value[m][e + 2] * keep);
      }
    }
  }

  // Writes them to a split's place.
  __device__ void Write(const DenseRows& rows, int split, float sum_unit) {
    const int lane = threadIdx.x % 32;
    float* const values = rows.Values(split);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        sum[e] += __shfl_xor_sync(kFullWarp, sum[e], apart);
      }
      const int head = lane % 4 * 2 + e;
      if (head >= rows.u.query_rows) continue;
      if (lane < 4) rows.Out(split, head, {max[e], sum[e], 0, 0});
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
        float* const to = values + head * kDim + m * 16 + lane / 4;
        to[0] = value[m][e] * sum_unit;
        to[8] = value[m][e + 2] * sum_unit;
      }
    }
  }
};

// The logits of kWarpRows rows in a tile, in D's order, not scaled.
template <DType kDType, int kDim>
__device__ inline void WarpLogits(const WarpQueries<kDType, kDim>& queries, const std::byte* tile,
                                  float (&l)[4]) {
  const int lane = threadIdx.x % 32;
  // Of the first term, over even and odd parts of the dimensions, and of the others.
  float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    LoadMatrix(a, tile + WarpTiles<kDim>::Chunk(lane % 16, 2 * k + lane / 16));
    MultiplyAdd<kDType>(sum[k % 2], a, queries.pairs[0][k][0], queries.pairs[0][k][1]);
    if (!queries.more) continue;
#pragma unroll
    for (int t = 1; t < kFloatTerms<kDType>; ++t) {
      MultiplyAdd<kDType>(rest[k % 2], a, queries.pairs[t][k][0], queries.pairs[t][k][1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) l[e] = (sum[0][e] + sum[1][e]) + (rest[0][e] + rest[1][e]);
}

// Folds splits of a unit by warps, each with splits of its own or, if kTogether, each with a run of
// every split.
template <DType kDType, int kDim, bool kTogether>
class WarpFold {
 public:
  using Sums = WarpSums<kDType, kDim>;

  // All lanes. stages: of this warp.
  __device__ WarpFold(const DenseRows& rows, std::byte* stages)
      : rows_(rows), stages_(stages), seen_by_all_(rows.u.n), runs_(RunsOfSplit(rows.u.n)) {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < rows.u.query_rows; ++r) seen_by_all_ = min(seen_by_all_, rows.u.visible[r]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = lane % 4 * 2 + e;
      visible_[e] = head < rows.u.query_rows ? rows.u.visible[head] : 0;
    }
  }

  // Returns false if the work is to stop. All warps of the block if kTogether.
  __device__ bool Fold(const SplitRange& splits) {
    const int warp = threadIdx.x / 32;
    const int first_run = kTogether ? min(warp, runs_) : 0;
    const int last_run = kTogether ? min(warp + 1, runs_) : runs_;
    WarpTiles<kDim> tiles(rows_, splits, first_run, last_run, runs_, stages_);
    WarpQueries<kDType, kDim> queries;
    queries.Load(rows_);
    for (int s = splits.begin; s < splits.end; s += splits.step) {
      if (Stops()) return false;
      const KvSplit split = rows_.At(s);
      Sums all;
      std::byte* tile = nullptr;
      for (int run = first_run; run < last_run; ++run) {
        Sums sums;
        FoldRun(queries, tiles, split, run, sums, tile);
        all.Merge(sums);
      }
      if (kTogether) {
        Gather(all, tile, s);
      } else {
        all.Write(rows_, s, 1 / kWeightUnit);
      }
    }
    return true;
  }

 private:
  // Weights of f16 are in the upper part of its range, so that small ones keep their bits.
  static constexpr float kWeightUnit = kDType == DType::kF16 ? 32768 : 1;
  static_assert(32 * sizeof(Sums) <= WarpTiles<kDim>::kStageBytes);

  __device__ bool Stops() const {
    if (rows_.wave.cancel == nullptr) return false;
    if (kTogether) return __syncthreads_or(threadIdx.x == 0 && rows_.Stops()) != 0;
    return __any_sync(kFullWarp, threadIdx.x % 32 == 0 && rows_.Stops()) != 0;
  }

  // tile: becomes the rows that were folded last.
  __device__ void FoldRun(const WarpQueries<kDType, kDim>& queries, WarpTiles<kDim>& tiles,
                          const KvSplit& split, int run, Sums& sums, std::byte*& tile) {
    const int lane = threadIdx.x % 32;
    const int end = RunBegin(split.count, run + 1, runs_);
    for (int first = RunBegin(split.count, run, runs_); first < end; first += kWarpRows) {
      tile = tiles.Next();
      float l[4];
      WarpLogits(queries, tile, l);
      const int64_t token = rows_.Token(split, first);
      const int count = min(kWarpRows, split.count - first);
      const bool all = count == kWarpRows && token + kWarpRows <= seen_by_all_;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8;
        l[e] *= queries.factor[e % 2];
        const bool sees = all || (row < count && token + row < visible_[e % 2]);
        if (sees && !isfinite(l[e]) && visible_[e % 2] > 0) rows_.Bad(split, first + row);
        if (!sees) l[e] = -INFINITY;
      }
      sums.Add(l, tile, kWeightUnit);
    }
  }

  // Merges the sums of the block's warps, and writes them to a split's place. tile: the rows that
  // this warp folded last, or null. Their stage is free until the warp asks for its next rows.
  __device__ void Gather(const Sums& own, std::byte* tile, int split) {
    __shared__ Sums* of_warps[kDenseWarps];
    const int lane = threadIdx.x % 32;
    if (tile != nullptr) {
      auto* const sums = reinterpret_cast<Sums*>(tile);
      if (lane == 0) of_warps[threadIdx.x / 32] = sums;
      __syncwarp();
      sums[lane] = own;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      Sums all = own;
      for (int run = 1; run < runs_; ++run) all.Merge(of_warps[run][lane]);
      all.Write(rows_, split, 1 / kWeightUnit);
    }
    __syncthreads();
  }

  const DenseRows& rows_;
  std::byte* const stages_;
  int64_t seen_by_all_;
  const int runs_;
  int64_t visible_[2];
};

// Folds the splits of dense units. Grid (blocks); kDenseWarps warps. Shared memory: DenseWarpBytes.
template <DType kDType, int kDim, bool kTogether>
__global__ void __launch_bounds__(32 * kDenseWarps, kDenseWarpBlocksPerSm)
    DenseWarpKernel(DenseWave wave) {
  extern __shared__ __align__(128) std::byte fold_memory[];
  __shared__ __align__(8) std::byte units[kDenseWarps][sizeof(DenseUnit)];  // has a constructor
  const int warp = threadIdx.x / 32;
  auto& u = *reinterpret_cast<DenseUnit*>(units[warp]);
  std::byte* const stages = fold_memory + warp * (DenseWarpBytes(kDim) / kDenseWarps);
  const auto blocks = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  // Neighbouring workers are in other blocks, so that few of them spread over the GPU.
  DenseTurns turns = kTogether ? DenseTurns(wave, block, blocks, wave.link_workers / kDenseWarps)
                               : DenseTurns(wave, warp * blocks + block, kDenseWarps * blocks);
  GridDependencyWait();
  TriggerDependents();
  const auto load = [](const DenseUnit* from, DenseUnit& to) {
    __syncwarp();
    LoadByWarp(from, to);
  };
  for (SplitRange splits; turns.Next(u, splits, load);) {
    const DenseRows rows(wave, u);
    if (!WarpFold<kDType, kDim, kTogether>(rows, stages).Fold(splits)) return;
  }
}

}  // namespace spillway::cuda
