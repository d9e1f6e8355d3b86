#pragma once

#include "gpu/kernels/fold_tensor.cuh"
#include "gpu/kernels/hadamard.cuh"
#include "gpu/kernels/rows.cuh"

// Folds sampled rows of coded units: sums of x v - x^ v^ in place of those of x v, with the moments
// of both (host/core/value_code.h). Such rows are few, and each query head has its own estimate of
// a row, so sums are made in fp32, without tensor cores. The order of every sum depends on the
// split alone.
namespace spillway::cuda {

inline constexpr int kCodedThreads = 128;
inline constexpr int kCodedWarps = kCodedThreads / 32;
// Rows of a split that a block has at a time, one for each lane.
inline constexpr int kCodedRows = 32;
// Query heads that a block folds for.
inline constexpr int kCodedHeads = 4;
static_assert(kCodedHeads <= kCodedWarps);
// Blocks that a multiprocessor runs at once.
inline constexpr int kCodedBlocksPerSm = 4;

// What a lane adds up for a query head. Its dimensions are lane, lane + 32, ...
template <int kLaneDims>
struct CodedSums {
  static constexpr int kLanePairs = (kProjectedPairs + 31) / 32;
  float value[kLaneDims];   // sum r, with r = x v - x^ v^
  float square[kLaneDims];  // sum (x - x^) r
  float pairs[kLanePairs];  // sum y_a y_b of the projections y of r: pairs lane, lane + 32, ...
  float norm;               // the lane's part of sum ||r||^2

  __device__ void Scale(float keep) {
    const float keep_sq = keep * keep;
#pragma unroll
    for (float& x : value) x *= keep;
#pragma unroll
    for (float& x : square) x *= keep_sq;
#pragma unroll
    for (float& x : pairs) x *= keep_sq;
    norm *= keep_sq;
  }
};

// Floats that a head's CodedSums have together: value [d], square [d], pairs, and the norm.
__host__ __device__ inline int CodedFloats(int head_dim) {
  return 2 * head_dim + kProjectedPairs + 1;
}

// What is known of the rows of a batch; in shared memory.
struct CodedBatch {
  const std::byte* rows[kCodedRows];
  const std::byte* codes[kCodedRows];  // the tokens' code pages
  int slots[kCodedRows];
  float logits[kCodedHeads][kCodedRows];
  // x, x^, and g x^ as rounded for codes.
  float x[kCodedHeads][kCodedRows];
  float estimate[kCodedHeads][kCodedRows];
  float code[kCodedHeads][kCodedRows];
  float keep[kCodedHeads];  // factor of the sums of earlier batches
};

// Folds splits of a unit for kCodedHeads query heads. kLaneDims: 32 kLaneDims >= d.
template <int kLaneDims>
class CodedFold {
 public:
  // queries [kCodedHeads][d], scaled; turned [kCodedWarps][d]; totals [kCodedHeads][CodedFloats()];
  // signs: of the projection. All in shared memory.
  __device__ CodedFold(const AttendShape& shape, const UnitRequest& u, int first_head,
                       const float* queries, float* turned, float* totals, CodedBatch& batch,
                       SoftmaxSums* sums)
      : shape_(shape),
        u_(u),
        first_head_(first_head),
        heads_(min(kCodedHeads, shape.group - first_head)),
        queries_(queries),
        turned_(turned + threadIdx.x / 32 * shape.head_dim),
        totals_(totals),
        batch_(batch),
        sums_(sums),
        inverse_unit_(1 / ValueUnit(u)) {}

  __device__ void Fold(const KvSplit& split, float* partial) {
    if (threadIdx.x < kCodedHeads) sums_[threadIdx.x] = SoftmaxSums::Empty();
#pragma unroll
    for (auto& own : own_) own = {};
    for (int first = 0; first < split.count; first += kCodedRows) {
      const int count = min(kCodedRows, split.count - first);
      __syncthreads();
      FindRows(split.first + first, count);
      __syncthreads();
      Logits(count);
      __syncthreads();
      Weigh(split.first + first, count);
      __syncthreads();
      AddRows(count);
    }
    Store(partial);
  }

 private:
  __device__ void FindRows(int64_t first, int count) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= count) return;
    const uint32_t token = u_.list[first + i];
    batch_.rows[i] = u_.sources[first + i];
    batch_.codes[i] = u_.code_pages[token / kPageTokenCount];
    batch_.slots[i] = CodeTiling::factor_index(static_cast<int>(token % kPageTokenCount));
  }

  // One warp per row in turn.
  __device__ void Logits(int count) {
    for (int row = warp_; row < count; row += kCodedWarps) {
      float k[kLaneDims];
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        k[j] = i < d_ ? LoadElement(shape_.dtype, batch_.rows[row], i) : 0.0f;
      }
#pragma unroll
      for (int h = 0; h < kCodedHeads; ++h) {
        if (h >= heads_) break;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
          const int i = j * 32 + lane_;
          if (i < d_) sum = fmaf(k[j], queries_[h * d_ + i], sum);
        }
        sum = WarpSum(sum);
        if (lane_ == 0) batch_.logits[h][row] = sum;
      }
    }
  }

  // Sets x, x^ and what becomes of earlier sums; adds to the sums of x. One warp per head, one lane
  // per row.
  __device__ void Weigh(int64_t first, int count) {
    const int h = warp_;
    if (h >= heads_) return;
    const int g = first_head_ + h;
    const bool there = lane_ < count;
    const float reference = FromOrderedBits(u_.state->reference[g]);
    float logit = -INFINITY;
    uint8_t level = 0;
    float weight = 0;
    if (there) {
      logit = batch_.logits[h][lane_];
      const uint32_t token = u_.list[first + lane_];
      if (!isfinite(logit)) atomicMin(&u_.state->error_token, token);
      const int64_t page = token / kPageTokenCount;
      const int slot = batch_.slots[lane_];
      level = u_.codes.levels[(page * shape_.group + g) * kPageTokenCount + slot];
      const float largest = u_.codes.weights[page * shape_.group + g].largest;
      const auto* factors = reinterpret_cast<const uint16_t*>(
          batch_.codes[lane_] + shape_.tiling.value_factor_offset_bytes());
      weight = static_cast<float>(CodeWeight(LevelWeight(level) * BFloat16ToFloat(factors[slot]),
                                             CodeWeightInverse(largest))) *
               CodeWeightUnit(largest) * inverse_unit_;
    }
    const float of_level = level != 0 ? LevelLogit(level, reference) : -INFINITY;
    const float max = fmaxf(WarpMax(fmaxf(logit, of_level)), sums_[h].max);
    // If a row has a level, the reference is at most kLevelZero / kLevelsPerOctave octaves above
    // max.
    constexpr float kAboveMax = 40.0f;
    const float unit = ExpF32(fminf(LevelLogit(kLevelZero, reference) - max, kAboveMax));
    const float x = there ? ExpF32(logit - max) : 0.0f;
    const float estimate = LevelWeight(level) * unit;
    const float residual = x - estimate;
    batch_.x[h][lane_] = x;
    batch_.estimate[h][lane_] = estimate;
    batch_.code[h][lane_] = weight * unit;
    const float sum = WarpSum(residual);
    const float sum_sq = WarpSum(residual * residual);
    __syncwarp();  // all have read the old maximum
    if (lane_ == 0) batch_.keep[h] = sums_[h].Merge({max, sum, sum_sq, 0}).keep;
  }

  // Sets the warp's turned_ to H^T t of a row's value code.
  __device__ void Decode(int row) {
    const CodeTiling& tiling = shape_.tiling;
    const int slot = batch_.slots[row];
    const auto* words =
        reinterpret_cast<const uint32_t*>(batch_.codes[row] + tiling.value_code_offset_bytes()) +
        slot / 4 * tiling.value_row_words();
    const int byte = slot % 4 * 8;
    const float middle = 0.5f * static_cast<float>((1 << tiling.value_bits) - 1);
    __syncwarp();
    for (int part = 0; part < tiling.value_parts(); ++part) {
      const int width = tiling.value_width(part);
      const int count = tiling.value_words(part);
      for (int j = lane_; j < count; j += 32) {
        const uint32_t fields = words[j] >> byte;
        for (int p = 0; p < 8 / width; ++p) {
          const auto u = static_cast<float>(fields >> (p * width) & ((1u << width) - 1));
          float& t = turned_[p * count + j];
          t = part == 0 ? u - middle : fmaf(u, 4.0f, t);
        }
      }
      // Parts have their dimensions in other orders.
      __syncwarp();
      words += count;
    }
    UndoHadamard(d_, turned_, lane_, 32, [] { __syncwarp(); });
  }

  // One warp per row in turn.
  __device__ void AddRows(int count) {
#pragma unroll
    for (int h = 0; h < kCodedHeads; ++h) {
      if (h < heads_) own_[h].Scale(batch_.keep[h]);
    }
    for (int row = warp_; row < count; row += kCodedWarps) {
      Decode(row);
      const auto* centre = reinterpret_cast<const uint16_t*>(
          batch_.codes[row] + shape_.tiling.value_centre_offset_bytes());
      float v[kLaneDims], c[kLaneDims], t[kLaneDims];
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        const bool present = i < d_;
        v[j] = present ? LoadElement(shape_.dtype, batch_.rows[row], d_ + i) * inverse_unit_ : 0.0f;
        c[j] = present ? BFloat16ToFloat(centre[i]) * inverse_unit_ : 0.0f;
        t[j] = present ? turned_[i] : 0.0f;
      }
#pragma unroll
      for (int h = 0; h < kCodedHeads; ++h) {
        if (h < heads_) AddRow(h, row, v, c, t);
      }
    }
  }

  __device__ void AddRow(int h, int row, const float (&v)[kLaneDims], const float (&c)[kLaneDims],
                         const float (&t)[kLaneDims]) {
    CodedSums<kLaneDims>& own = own_[h];
    const float x = batch_.x[h][row];
    const float estimate = batch_.estimate[h][row];
    const float code = batch_.code[h][row];
    const float weight = x - estimate;
    float y = 0;  // of dimension lane % 16 of the projection
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      const float r = fmaf(t[j], -code, fmaf(c[j], -estimate, v[j] * x));
      own.value[j] += r;
      own.square[j] = fmaf(r, weight, own.square[j]);
      own.norm = fmaf(r, r, own.norm);
      y += u_.signs.Of(j * 32 + lane_, r);
    }
    static_assert(kProjectionDims == 16);
    y += __shfl_xor_sync(kFullWarp, y, 16);
#pragma unroll
    for (int j = 0; j < CodedSums<kLaneDims>::kLanePairs; ++j) {
      const int apart = (j * 32 + lane_) / kProjectionDims;
      const float other = __shfl_sync(kFullWarp, y, (lane_ + apart) % kProjectionDims);
      own.pairs[j] = fmaf(y, other, own.pairs[j]);
    }
  }

  // Adds up the warps' sums, in their order, and stores the split's.
  __device__ void Store(float* partial) {
    const int floats = CodedFloats(d_);
    for (int i = threadIdx.x; i < kCodedHeads * floats; i += kCodedThreads) totals_[i] = 0;
    for (int w = 0; w < kCodedWarps; ++w) {
      __syncthreads();
      if (warp_ != w) continue;
#pragma unroll
      for (int h = 0; h < kCodedHeads; ++h) {
        if (h >= heads_) break;
        float* const to = totals_ + h * floats;
        const float norm = WarpSum(own_[h].norm);
        if (lane_ == 0) to[floats - 1] += norm;
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
          const int i = j * 32 + lane_;
          if (i >= d_) break;
          to[i] += own_[h].value[j];
          to[d_ + i] += own_[h].square[j];
        }
#pragma unroll
        for (int j = 0; j < CodedSums<kLaneDims>::kLanePairs; ++j) {
          const int i = j * 32 + lane_;
          if (i < kProjectedPairs) to[2 * d_ + i] += own_[h].pairs[j];
        }
      }
    }
    __syncthreads();
    const int group = shape_.group;
    float* const values = partial + kSumsFloats * group;
    for (int i = threadIdx.x; i < heads_ * floats; i += kCodedThreads) {
      const int h = i / floats;
      const int at = i % floats;
      const int g = first_head_ + h;
      if (at < d_) {
        values[g * d_ + at] = totals_[i];
      } else if (at < 2 * d_) {
        values[(group + g) * d_ + at - d_] = totals_[i];
      } else if (at < 2 * d_ + kProjectedPairs) {
        values[2 * group * d_ + g * kProjectedPairs + at - 2 * d_] = totals_[i];
      } else {
        SoftmaxSums sums = sums_[h];
        sums.sum_sq_norm = totals_[i];
        reinterpret_cast<SoftmaxSums*>(partial)[g] = sums;
      }
    }
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const int first_head_;
  const int heads_;
  const float* const queries_;
  float* const turned_;
  float* const totals_;
  CodedBatch& batch_;
  SoftmaxSums* const sums_;
  const float inverse_unit_;
  const int d_ = shape_.head_dim;
  const int lane_ = threadIdx.x % 32;
  const int warp_ = threadIdx.x / 32;
  CodedSums<kLaneDims> own_[kCodedHeads];
};

__host__ __device__ inline size_t CodedFoldBytes(int head_dim) {
  return sizeof(float) * (static_cast<size_t>(kCodedHeads + kCodedWarps) * head_dim +
                          static_cast<size_t>(kCodedHeads) * CodedFloats(head_dim));
}

// Folds the splits of a phase of coded units, which have sampled rows only. Grid (blocks, units,
// quartets of heads). Shared memory: CodedFoldBytes().
template <int kLaneDims>
__global__ void __launch_bounds__(kCodedThreads, kLaneDims <= 4 ? kCodedBlocksPerSm : 2)
    FoldCodedKernel(AttendShape shape, int phase, const UnitRequest* units) {
  extern __shared__ __align__(16) float coded_memory[];
  __shared__ CodedBatch batch;
  __shared__ SoftmaxSums sums[kCodedHeads];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  if (!u.coded() || static_cast<int>(blockIdx.x) >= state.split_count[phase]) return;
  const int d = shape.head_dim;
  const int first_head = static_cast<int>(blockIdx.z) * kCodedHeads;
  float* const queries = coded_memory;
  float* const turned = queries + kCodedHeads * d;
  float* const totals = turned + kCodedWarps * d;
  for (int i = threadIdx.x; i < kCodedHeads * d; i += kCodedThreads) {
    queries[i] = first_head + i / d < shape.group ? u.q[first_head * d + i] * shape.scale : 0.0f;
  }
  CodedFold<kLaneDims> fold(shape, u, first_head, queries, turned, totals, batch, sums);
  for (int split = static_cast<int>(blockIdx.x); split < state.split_count[phase];
       split += static_cast<int>(gridDim.x)) {
    __syncthreads();
    fold.Fold(state.splits[phase][split],
              u.partials + (int64_t{phase} * kSplitMax + split) * PartialFloats(shape.group, d));
  }
}

}  // namespace spillway::cuda
