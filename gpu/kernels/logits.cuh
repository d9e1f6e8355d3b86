#pragma once

#include "gpu/kernels/page_scores.cuh"
#include "gpu/kernels/rows.cuh"
#include "host/core/score.h"
#include "host/methods/sketch/sketch_range.h"

// Scores from logits, a page of keys at a time: exact ones, every key read
// where it lies (for evaluation), or estimates from what index pages hold
// behind the codes. A block takes a page; each source says where its logits
// come from.
namespace spillway::cuda {

inline constexpr int kLogitThreads = kPageTokenCount;

// Exact logits. A logit that is not finite is remembered.
class ExactLogits {
 public:
  static size_t Bytes(const AttendShape& s) {
    return sizeof(float) * (s.group * s.head_dim + s.group * kPageTokenCount +
                            TileRows(s.head_dim) * TileStride(s.head_dim));
  }
  __device__ ExactLogits(const AttendShape& shape, const UnitRequest& u, float* memory)
      : shape_(shape),
        u_(u),
        queries_(memory),
        logits_(memory + shape.group * shape.head_dim),
        tile_(logits_ + shape.group * kPageTokenCount) {
    for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
      queries_[i] = u.q[i] * shape.scale;
    }
  }
  // Of the page's first `count` tokens; all threads, before and after as well.
  __device__ void Compute(int64_t page_index, int count) {
    const int d = shape_.head_dim;
    const int rows = TileRows(d);
    const std::byte* page = u_.row_pages[page_index];
    for (int at = 0; at < count; at += rows) {
      const int m = min(rows, count - at);
      __syncthreads();
      LoadTile(
          shape_.dtype, d, m, [&](int i) { return page + (at + i) * shape_.row_bytes; }, tile_);
      __syncthreads();
      for (int i = threadIdx.x; i < m * shape_.group; i += blockDim.x) {
        const int row = i % m;
        const int head = i / m;
        const float l = Dot(tile_ + row * TileStride(d), queries_ + head * d, d);
        if (!isfinite(l)) {
          atomicMin(&u_.state->error_token,
                    static_cast<uint32_t>(page_index * kPageTokenCount + at + row));
        }
        logits_[head * kPageTokenCount + at + row] = l;
      }
    }
    __syncthreads();
  }
  // Of the thread's own token.
  __device__ float Get(int head) const { return logits_[head * kPageTokenCount + threadIdx.x]; }

 private:
  const AttendShape& shape_;
  const UnitRequest& u_;
  float* queries_;  // [G][d], scaled
  float* logits_;   // [G][128]
  float* tile_;
};

// Estimates from 4-bit elements, of all channels or of the label channels.
template <int kRows>
class SketchEstimates {
 public:
  static size_t Bytes(const AttendShape& s) { return sizeof(float) * kRows * (s.head_dim + 1); }
  __device__ SketchEstimates(const AttendShape& shape, const UnitRequest& u, float* memory)
      : u_(u), queries_(memory) {
    const bool labels = shape.selector == Selector::kDoubleSparsity;
    channels_ = labels ? shape.sections.label_channels : shape.head_dim;
    offset_ = shape.section_offset + (labels ? shape.sections.labels() : shape.sections.sketch());
    for (int i = threadIdx.x; i < channels_ * kRows; i += blockDim.x) {
      const int channel = labels ? u.channels[i / kRows] : i / kRows;
      const int head = i % kRows;
      queries_[i] = head < shape.group ? u.q[head * shape.head_dim + channel] * shape.scale : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < kRows) {
      float sum = 0;
      for (int i = 0; i < channels_; ++i) sum += queries_[i * kRows + threadIdx.x];
      queries_[channels_ * kRows + threadIdx.x] = sum;
    }
    __syncthreads();
  }
  __device__ void Compute(int64_t page_index, int) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(u_.code_pages[page_index] + offset_) + threadIdx.x;
    float dots[kRows] = {};
#pragma unroll 2
    for (int w = 0; w < channels_ / 8; ++w) {
      const uint32_t word = __ldcs(words + w * kPageTokenCount);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto x = static_cast<float>(word >> (4 * i) & 15u);
#pragma unroll
        for (int h = 0; h < kRows; h += 4) {
          const float4 q = *reinterpret_cast<const float4*>(queries_ + (8 * w + i) * kRows + h);
          dots[h] = fmaf(q.x, x, dots[h]);
          dots[h + 1] = fmaf(q.y, x, dots[h + 1]);
          dots[h + 2] = fmaf(q.z, x, dots[h + 2]);
          dots[h + 3] = fmaf(q.w, x, dots[h + 3]);
        }
      }
    }
    const SketchRange range = SketchRange::Unpack(__ldcs(words + channels_ / 8 * kPageTokenCount));
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      logits_[h] = CutEstimate(range.Dot(dots[h], queries_[channels_ * kRows + h]));
    }
  }
  __device__ float Get(int head) const {
    float l = 0;
#pragma unroll
    for (int h = 0; h < kRows; ++h) l = h == head ? logits_[h] : l;
    return l;
  }

 private:
  const UnitRequest& u_;
  float* queries_;  // [channels][kRows] scaled, then their sums
  int channels_;
  int64_t offset_;
  float logits_[kRows];
};

// What the bounds of Quest's pages allow at most.
class BoundEstimates {
 public:
  static constexpr int kPagesMax = 8;  // of an index page
  static size_t Bytes(const AttendShape& s) {
    return sizeof(float) * s.group * (s.head_dim + kPagesMax);
  }
  __device__ BoundEstimates(const AttendShape& shape, const UnitRequest& u, float* memory)
      : shape_(shape), u_(u), queries_(memory), logits_(memory + shape.group * shape.head_dim) {
    for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
      queries_[i] = u.q[i] * shape.scale;
    }
  }
  __device__ void Compute(int64_t page_index, int) {
    const int d = shape_.head_dim;
    const int pages = shape_.sections.bound_pages;
    const std::byte* bounds =
        u_.code_pages[page_index] + shape_.section_offset + shape_.sections.bounds();
    __syncthreads();  // the page before has been read
    for (int task = threadIdx.x; task < pages * shape_.group; task += blockDim.x) {
      const int page = task % pages;
      const int head = task / pages;
      float sum = 0;
      for (int i = 0; i < d; ++i) {
        const float q = queries_[head * d + i];
        const float low = q * LoadElement(shape_.dtype, bounds, i * pages + page);
        const float high = q * LoadElement(shape_.dtype, bounds, (d + i) * pages + page);
        sum += low > high ? low : high;
      }
      logits_[head * kPagesMax + page] = CutEstimate(sum);
    }
    __syncthreads();
  }
  __device__ float Get(int head) const {
    const int page =
        static_cast<int>(threadIdx.x) / (kPageTokenCount / shape_.sections.bound_pages);
    return logits_[head * kPagesMax + page];
  }

 private:
  const AttendShape& shape_;
  const UnitRequest& u_;
  float* queries_;  // [G][d], scaled
  float* logits_;   // [G][kPagesMax]
};

// The sampled pages' logits and their largest. Grid (blocks, units).
template <typename Source>
__global__ void __launch_bounds__(kLogitThreads)
    LogitReferenceKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  if (blockIdx.x >= pages.count) return;
  Source source(shape, u, memory);
  __syncthreads();
  for (int64_t i = blockIdx.x; i < pages.count; i += gridDim.x) {
    const int64_t page_index = pages.page(i);
    const int64_t first = page_index * kPageTokenCount;
    const int count = static_cast<int>(min(static_cast<int64_t>(kPageTokenCount), u.end - first));
    source.Compute(page_index, count);
    const int slot = threadIdx.x;
    for (int head = 0; head < shape.group && slot < count; ++head) {
      const float x = OracleScore(source.Get(head));
      u.sample_logits[head * u.sample_token_count + i * kPageTokenCount + slot] = x;
      if (first + slot >= u.begin) atomicMax(&u.state->reference[head], OrderedBits(x));
    }
  }
}

// Bins of every token. Grid (blocks, units). Shared memory: the histogram, then
// the source's.
template <typename Source>
__global__ void __launch_bounds__(kLogitThreads)
    ScoreLogitsKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  auto* const histogram = reinterpret_cast<uint32_t*>(memory);
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  if (blockIdx.x >= page_count) return;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  const UnitState& state = *u.state;
  Source source(shape, u, memory + kScoreBinCount);
  __syncthreads();
  for (int64_t page_index = blockIdx.x; page_index < page_count; page_index += gridDim.x) {
    const int64_t first = page_index * kPageTokenCount;
    const int64_t wanted = min(static_cast<int64_t>(kPageTokenCount), u.end - first);
    source.Compute(page_index, wanted > 0 ? static_cast<int>(wanted) : 0);
    const int64_t token = first + threadIdx.x;
    float score = 0;
    for (int h = 0; token >= u.begin && token < u.end && h < shape.group; ++h) {
      const float x = source.Get(h) * kExpLog2E;
      const float e = ScoreExp2(x - FromOrderedBits(state.reference[h]));
      score = fmaf(e, ScoreHeadWeight(state.mass[h]), score);
      if (shape.by_mass) {
        u.head_bins[h * u.n + token] = static_cast<uint16_t>(__float_as_uint(e) >> kScoreBinShift);
      }
    }
    PageSlots(u, page_index)
        .Store(threadIdx.x, __float_as_uint(score) >> kScoreBinShift, histogram);
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

}  // namespace spillway::cuda
