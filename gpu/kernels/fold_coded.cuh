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

// Shared memory of a block, in bytes from its beginning: the queries [kCodedHeads][d] as floats, a
// vector [d] for each warp, then rows, value codes and value centres of a batch, and rows of 8 bits
// as they are stored; in place of these, in the end, the warps' sums
// [kCodedWarps][kCodedHeads][CodedFloats()].
struct CodedLayout {
  int row_bytes, code_bytes, centre_bytes, stored_bytes;  // of a row
  int queries, turned, rows, codes, centres, stored, end;

  __host__ __device__ explicit CodedLayout(const AttendShape& shape) {
    const int vector_bytes = shape.head_dim * static_cast<int>(sizeof(float));
    row_bytes = static_cast<int>(shape.format().element_bytes());
    stored_bytes = static_cast<int>(shape.row_bytes);
    code_bytes = 4 * shape.tiling.value_row_words();
    centre_bytes = 2 * shape.head_dim;
    queries = 0;
    turned = queries + kCodedHeads * vector_bytes;
    rows = turned + kCodedWarps * vector_bytes;
    codes = rows + kCodedRows * row_bytes;
    centres = codes + kCodedRows * code_bytes;
    stored = centres + kCodedRows * centre_bytes;
    const int batch = stored + (shape.row_type == RowType::kInt8 ? kCodedRows * stored_bytes : 0);
    const int sums = rows + kCodedWarps * kCodedHeads * CodedFloats(shape.head_dim) *
                                static_cast<int>(sizeof(float));
    end = batch > sums ? batch : sums;
  }
  __device__ float* sums(std::byte* memory) const {
    return reinterpret_cast<float*>(memory + rows);
  }
};

// What is known of the rows of a batch; in shared memory.
struct CodedBatch {
  const std::byte* rows[kCodedRows];
  const std::byte* codes[kCodedRows];  // the tokens' code pages
  uint32_t tokens[kCodedRows];
  float logits[kCodedHeads][kCodedRows];
  // x, x^, and g x^ as rounded for codes.
  float x[kCodedHeads][kCodedRows];
  float estimate[kCodedHeads][kCodedRows];
  float code[kCodedHeads][kCodedRows];
  float keep[kCodedHeads];  // factor of the sums of earlier batches
};

// Where a token's factors are in its code page, as an index.
__device__ inline int FactorIndex(uint32_t token) {
  return CodeTiling::factor_index(static_cast<int>(token % kPageTokenCount));
}

// Copies `bytes`, a multiple of 8, to shared memory, by threads first, first + step, ...
__device__ inline void CopyRow(std::byte* to, const std::byte* from, int bytes, int first,
                               int step) {
  if (bytes % 16 == 0) {
    for (int i = first * 16; i < bytes; i += step * 16) CopyAhead<16>(to + i, from + i);
  } else {
    for (int i = first * 8; i < bytes; i += step * 8) CopyAhead<8>(to + i, from + i);
  }
}

// Folds splits of a unit for kCodedHeads query heads. kLaneDims: 32 kLaneDims >= d.
template <int kLaneDims>
class CodedFold {
 public:
  // memory: CodedLayout, in shared memory like batch and sums [kCodedHeads]; the queries are there.
  __device__ CodedFold(const AttendShape& shape, const UnitRequest& u, int first_head,
                       const CodedLayout& at, std::byte* memory, CodedBatch& batch,
                       SoftmaxSums* sums)
      : shape_(shape),
        u_(u),
        first_head_(first_head),
        heads_(min(kCodedHeads, shape.group - first_head)),
        at_(at),
        memory_(memory),
        turned_(reinterpret_cast<float*>(memory + at.turned) + threadIdx.x / 32 * shape.head_dim),
        batch_(batch),
        sums_(sums),
        inverse_unit_(1 / ValueUnit(u)),
        scale_(HadamardScale(shape.head_dim)) {
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      if (HadamardNegates(0, j * 32 + lane_)) negates_ |= 1u << j;
    }
  }

  __device__ void Fold(const KvSplit& split, float* partial) {
    if (threadIdx.x < kCodedHeads) sums_[threadIdx.x] = SoftmaxSums::Empty();
#pragma unroll
    for (auto& own : own_) own = {};
    for (int first = 0; first < split.count; first += kCodedRows) {
      const int count = min(kCodedRows, split.count - first);
      __syncthreads();
      FindRows(split.first + first, count);
      __syncthreads();
      Bring(count);
      const OwnCode own_code = LoadCode(count);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      if (shape_.row_type == RowType::kInt8) {
        Decode(count);
        __syncthreads();
      }
      Logits(count);
      __syncthreads();
      Weigh(count, own_code);
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
    batch_.tokens[i] = token;
    batch_.rows[i] = u_.sources[first + i];
    batch_.codes[i] = u_.code_pages[token / kPageTokenCount];
  }

  // Starts to copy rows, codes and centres: four threads a row.
  __device__ void Bring(int count) {
    static_assert(kCodedThreads == 4 * kCodedRows);
    const int row = threadIdx.x / 4;
    const int quarter = threadIdx.x % 4;
    if (row >= count) return;
    const CodeTiling& tiling = shape_.tiling;
    const std::byte* const page = batch_.codes[row];
    std::byte* const to = shape_.row_type == RowType::kInt8
                              ? memory_ + at_.stored + row * at_.stored_bytes
                              : memory_ + at_.rows + row * at_.row_bytes;
    CopyRow(to, batch_.rows[row], at_.stored_bytes, quarter, 4);
    CopyRow(memory_ + at_.codes + row * at_.code_bytes,
            page + tiling.value_code_offset_bytes() +
                FactorIndex(batch_.tokens[row]) / 4 * at_.code_bytes,
            at_.code_bytes, quarter, 4);
    CopyRow(memory_ + at_.centres + row * at_.centre_bytes,
            page + tiling.value_centre_offset_bytes(), at_.centre_bytes, quarter, 4);
  }

  // Four lanes a row; the rows behind the last one are not read.
  __device__ void Decode(int count) {
    const int row = min(static_cast<int>(threadIdx.x) / 4, count - 1);
    std::byte* const to = memory_ + at_.rows + row * at_.row_bytes;
    const DType dtype = shape_.dtype;
    DecodeInt8Row(
        d_, memory_ + at_.stored + row * at_.stored_bytes, static_cast<int>(threadIdx.x) % 4, 4,
        [&](int i, float4 low, float4 high) { StoreEight(dtype, low, high, i, to); },
        [&](int i, float x) { StoreRounded(dtype, x, i, to); });
  }

  // What codes say about the lane's row, for the warp's head.
  struct OwnCode {
    uint8_t level;
    float weight;  // g x^ as rounded, in units of 2^M_h
  };
  __device__ OwnCode LoadCode(int count) const {
    if (warp_ >= heads_ || lane_ >= count) return {0, 0};
    const int g = first_head_ + warp_;
    const uint32_t token = batch_.tokens[lane_];
    const int64_t page = token / kPageTokenCount;
    const int index = FactorIndex(token);
    const uint8_t level = u_.codes.levels[(page * shape_.group + g) * kPageTokenCount + index];
    const float largest = u_.codes.largest[page * shape_.group + g];
    const auto* factors = reinterpret_cast<const uint16_t*>(
        batch_.codes[lane_] + shape_.tiling.value_factor_offset_bytes());
    const int weight = CodeWeight(LevelWeight(level) * BFloat16ToFloat(factors[index]),
                                  CodeWeightInverse(largest));
    return {level, static_cast<float>(weight) * CodeWeightUnit(largest) * inverse_unit_};
  }

  __device__ const std::byte* RowOf(int row) const {
    return memory_ + at_.rows + row * at_.row_bytes;
  }

  // One warp per row in turn.
  __device__ void Logits(int count) {
    const auto* queries = reinterpret_cast<const float*>(memory_ + at_.queries);
#pragma unroll 2
    for (int row = warp_; row < count; row += kCodedWarps) {
      float sum[kCodedHeads] = {};
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        if (i >= d_) break;
        const float k = LoadElement(shape_.dtype, RowOf(row), i);
#pragma unroll
        for (int h = 0; h < kCodedHeads; ++h) sum[h] = fmaf(k, queries[h * d_ + i], sum[h]);
      }
      const float logit = ReduceByLane(sum, [](float a, float b) { return a + b; });
      if (lane_ % (32 / kCodedHeads) == 0) batch_.logits[lane_ / (32 / kCodedHeads)][row] = logit;
    }
  }

  // Sets x, x^ and what becomes of earlier sums; adds to the sums of x. One warp per head, one lane
  // per row.
  __device__ void Weigh(int count, const OwnCode& own) {
    const int h = warp_;
    if (h >= heads_) return;
    const bool there = lane_ < count;
    const float reference = FromOrderedBits(u_.state->reference[first_head_ + h]);
    float logit = -INFINITY;
    if (there) {
      logit = batch_.logits[h][lane_];
      if (!isfinite(logit)) atomicMin(&u_.state->error_token, batch_.tokens[lane_]);
    }
    const float of_level = own.level != 0 ? LevelLogit(own.level, reference) : -INFINITY;
    const float max = fmaxf(WarpMax(fmaxf(logit, of_level)), sums_[h].max);
    // If a row has a level, the reference is at most kLevelZero / kLevelsPerOctave octaves above
    // max.
    constexpr float kAboveMax = 40.0f;
    const float unit = ExpF32(fminf(LevelLogit(kLevelZero, reference) - max, kAboveMax));
    const float x = there ? ExpF32(logit - max) : 0.0f;
    const float estimate = LevelWeight(own.level) * unit;
    const float residual = x - estimate;
    batch_.x[h][lane_] = x;
    batch_.estimate[h][lane_] = estimate;
    batch_.code[h][lane_] = own.weight * unit;
    const float sum = WarpSum(residual);
    const float sum_sq = WarpSum(residual * residual);
    __syncwarp();  // all have read the old maximum
    if (lane_ == 0) batch_.keep[h] = sums_[h].Merge({max, sum, sum_sq, 0}).keep;
  }

  // Element i of t, a row's value code. words: of the row's four tokens; byte: of the token.
  __device__ float CodeOf(const uint32_t* words, int byte, int i) const {
    const CodeTiling& tiling = shape_.tiling;
    const int width = tiling.value_width(0);
    const int count = tiling.value_words(0);
    float t =
        static_cast<float>(words[i % count] >> (byte + i / count * width) & ((1u << width) - 1)) -
        0.5f * static_cast<float>((1 << tiling.value_bits) - 1);
    if (tiling.value_parts() == 2) {
      const int more = tiling.value_words(1);
      t += static_cast<float>(words[count + i % more] >> (byte + i / more) & 1u) * 4.0f;
    }
    return t;
  }

  // Sets t to H^T t of a row's value code.
  __device__ void Decode(int row, float (&t)[kLaneDims]) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(memory_ + at_.codes + row * at_.code_bytes);
    const int byte = FactorIndex(batch_.tokens[row]) % 4 * 8;
    if (d_ != 32 * kLaneDims) {
      __syncwarp();
      for (int i = lane_; i < d_; i += 32) turned_[i] = CodeOf(words, byte, i);
      __syncwarp();
      UndoHadamard(d_, turned_, lane_, 32, [] { __syncwarp(); });
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        t[j] = i < d_ ? turned_[i] : 0.0f;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) t[j] = CodeOf(words, byte, j * 32 + lane_);
#pragma unroll
    for (int span = 1; span < 32; span *= 2) {
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const float other = __shfl_xor_sync(kFullWarp, t[j], span);
        t[j] = (lane_ & span) != 0 ? other - t[j] : t[j] + other;
      }
    }
#pragma unroll
    for (int apart = 1; apart < kLaneDims; apart *= 2) {
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        if ((j & apart) != 0) continue;
        const float a = t[j], b = t[j + apart];
        t[j] = a + b;
        t[j + apart] = a - b;
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      const float x = t[j] * scale_;
      t[j] = (negates_ >> j & 1u) != 0 ? -x : x;
    }
  }

  // One warp per row in turn.
  __device__ void AddRows(int count) {
#pragma unroll
    for (int h = 0; h < kCodedHeads; ++h) {
      if (h < heads_) own_[h].Scale(batch_.keep[h]);
    }
    for (int row = warp_; row < count; row += kCodedWarps) {
      const auto* centre =
          reinterpret_cast<const uint16_t*>(memory_ + at_.centres + row * at_.centre_bytes);
      float v[kLaneDims], c[kLaneDims], t[kLaneDims];
      Decode(row, t);
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        const bool present = i < d_;
        v[j] = present ? LoadElement(shape_.dtype, RowOf(row), d_ + i) * inverse_unit_ : 0.0f;
        c[j] = present ? BFloat16ToFloat(centre[i]) * inverse_unit_ : 0.0f;
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
    float* const all = at_.sums(memory_);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kCodedHeads; ++h) {
      if (h >= heads_) break;
      float* const to = all + (warp_ * kCodedHeads + h) * floats;
      const float norm = WarpSum(own_[h].norm);
      if (lane_ == 0) to[floats - 1] = norm;
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) {
        const int i = j * 32 + lane_;
        if (i >= d_) break;
        to[i] = own_[h].value[j];
        to[d_ + i] = own_[h].square[j];
      }
#pragma unroll
      for (int j = 0; j < CodedSums<kLaneDims>::kLanePairs; ++j) {
        const int i = j * 32 + lane_;
        if (i < kProjectedPairs) to[2 * d_ + i] = own_[h].pairs[j];
      }
    }
    __syncthreads();
    const int group = shape_.group;
    float* const values = partial + kSumsFloats * group;
    for (int h = 0; h < heads_; ++h) {
      const int g = first_head_ + h;
      for (int i = threadIdx.x; i < floats; i += kCodedThreads) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kCodedWarps; ++w) sum += all[(w * kCodedHeads + h) * floats + i];
        if (i < d_) {
          values[g * d_ + i] = sum;
        } else if (i < 2 * d_) {
          values[(group + g) * d_ + i - d_] = sum;
        } else if (i < 2 * d_ + kProjectedPairs) {
          values[2 * group * d_ + g * kProjectedPairs + i - 2 * d_] = sum;
        } else {
          SoftmaxSums sums = sums_[h];
          sums.sum_sq_norm = sum;
          reinterpret_cast<SoftmaxSums*>(partial)[g] = sums;
        }
      }
    }
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const int first_head_;
  const int heads_;
  const CodedLayout& at_;
  std::byte* const memory_;
  float* const turned_;
  CodedBatch& batch_;
  SoftmaxSums* const sums_;
  const float inverse_unit_;
  const float scale_;
  uint32_t negates_ = 0;  // bit j: see HadamardNegates(), of dimension 32 j + lane
  const int d_ = shape_.head_dim;
  const int lane_ = threadIdx.x % 32;
  const int warp_ = threadIdx.x / 32;
  CodedSums<kLaneDims> own_[kCodedHeads];
};

// Folds the splits of a phase of coded units, which have sampled rows only. Grid (blocks, units,
// quartets of heads). Shared memory: CodedLayout.
template <int kLaneDims>
__global__ void __launch_bounds__(kCodedThreads, kLaneDims <= 4 ? kCodedBlocksPerSm : 2)
    FoldCodedKernel(AttendShape shape, int phase, const UnitRequest* units) {
  extern __shared__ __align__(16) std::byte coded_memory[];
  __shared__ CodedBatch batch;
  __shared__ SoftmaxSums sums[kCodedHeads];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  if (!u.coded() || static_cast<int>(blockIdx.x) >= state.split_count[phase]) return;
  const int d = shape.head_dim;
  const int first_head = static_cast<int>(blockIdx.z) * kCodedHeads;
  const CodedLayout at(shape);
  auto* const queries = reinterpret_cast<float*>(coded_memory + at.queries);
  for (int i = threadIdx.x; i < kCodedHeads * d; i += kCodedThreads) {
    queries[i] = first_head + i / d < shape.group ? u.q[first_head * d + i] * shape.scale : 0.0f;
  }
  CodedFold<kLaneDims> fold(shape, u, first_head, at, coded_memory, batch, sums);
  for (int split = static_cast<int>(blockIdx.x); split < state.split_count[phase];
       split += static_cast<int>(gridDim.x)) {
    __syncthreads();
    fold.Fold(state.splits[phase][split],
              u.partials + (int64_t{phase} * kSplitMax + split) * PartialFloats(shape.group, d));
  }
}

}  // namespace spillway::cuda
