#pragma once

#include "gpu/kernels/page_scores.cuh"
#include "gpu/kernels/rows.cuh"
#include "host/core/score.h"

// Scores from logits. A block scores one page of keys at a time, and a `Source` computes the
// logits: here ExactLogits, which reads every key where it is (for evaluation).
//
// A source has a type `Context`, which the launch passes to it, and:
//   Bytes(shape, context)      bytes of shared memory that it needs
//   Source(shape, context, u, memory)
//   Compute(page, count)       computes the logits of the page's first `count` tokens; called by
//                              all threads; contains the barriers that it needs before and after
//   Get(head)                  the logit of the thread's own token
namespace spillway::cuda {

inline constexpr int kLogitThreads = kPageTokenCount;

// Exact logits. The first token with a logit that is not finite goes to UnitState::error_token.
class ExactLogits {
 public:
  struct Context {};
  static size_t Bytes(const AttendShape& s, const Context&) {
    return sizeof(float) * (s.group * s.head_dim + s.group * kPageTokenCount +
                            TileRows(s.head_dim) * TileStride(s.head_dim));
  }
  __device__ ExactLogits(const AttendShape& shape, const Context&, const UnitRequest& u,
                         float* memory)
      : shape_(shape),
        u_(u),
        queries_(memory),
        logits_(memory + shape.group * shape.head_dim),
        tile_(logits_ + shape.group * kPageTokenCount) {
    for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
      queries_[i] = u.q[i] * shape.scale;
    }
  }
  __device__ void Compute(int64_t page_index, int count) {
    const int d = shape_.head_dim;
    const int rows = TileRows(d);
    const std::byte* page = u_.row_pages[page_index];
    for (int at = 0; at < count; at += rows) {
      const int m = min(rows, count - at);
      __syncthreads();
      LoadTile(
          shape_.format(), d, m, [&](int i) { return page + (at + i) * shape_.row_bytes; }, tile_);
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
  __device__ float Get(int head) const { return logits_[head * kPageTokenCount + threadIdx.x]; }

 private:
  const AttendShape& shape_;
  const UnitRequest& u_;
  float* queries_;  // [G][d], scaled
  float* logits_;   // [G][128]
  float* tile_;
};

// The logits of the reference pages, and the largest per head. Grid (blocks, units).
template <typename Source>
__global__ void __launch_bounds__(kLogitThreads)
    LogitReferenceKernel(AttendShape shape, typename Source::Context context,
                         const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  __shared__ UnitRequest u;
  BeginSecond(units + blockIdx.y, u);
  const ReferencePages pages = ReferencePages::Of(u.begin, u.end);
  if (blockIdx.x >= pages.count) return;
  Source source(shape, context, u, memory);
  __syncthreads();
  for (int64_t i = blockIdx.x; i < pages.count; i += gridDim.x) {
    const int64_t page_index = pages.page(i);
    const int64_t first = page_index * kPageTokenCount;
    const int count = static_cast<int>(min(static_cast<int64_t>(kPageTokenCount), u.end - first));
    source.Compute(page_index, count);
    const int slot = threadIdx.x;
    for (int head = 0; head < shape.group && slot < count; ++head) {
      const float x = OracleScore(source.Get(head));
      u.reference_logits[head * u.reference_token_count + i * kPageTokenCount + slot] = x;
      if (first + slot >= u.begin) atomicMax(&u.state->reference[head], OrderedBits(x));
    }
  }
}

// The bins of all tokens and their histogram. Grid (blocks, units). Shared memory: the histogram,
// then the source's.
template <typename Source>
__global__ void __launch_bounds__(kLogitThreads)
    ScoreLogitsKernel(AttendShape shape, typename Source::Context context,
                      const UnitRequest* units) {
  extern __shared__ __align__(16) float memory[];
  auto* const histogram = reinterpret_cast<uint32_t*>(memory);
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const int64_t page_count = (u.n + kPageTokenCount - 1) / kPageTokenCount;
  if (blockIdx.x >= page_count) return;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  const UnitState& state = *u.state;
  Source source(shape, context, u, memory + kScoreBinCount);
  __syncthreads();
  const int usual_level = shape.weighed ? WarpUsualLevel(shape.tiling, u) : 0;
  for (int64_t page_index = blockIdx.x; page_index < page_count; page_index += gridDim.x) {
    const int64_t first = page_index * kPageTokenCount;
    const int64_t wanted = min(static_cast<int64_t>(kPageTokenCount), u.end - first);
    source.Compute(page_index, wanted > 0 ? static_cast<int>(wanted) : 0);
    const PageSlots slots(u, page_index);
    const int slot = threadIdx.x;
    const bool scored = slots.Scored(slot);
    const bool weighed = scored && shape.weighed;
    const uint8_t norm = weighed ? NormOf(shape.tiling, u.code_pages[page_index], slot) : 0;
    const bool stray = weighed && norm == kStrayNorm;
    // The page is closed if one of its tokens is weighed.
    const int raise = shape.weighed && wanted > 0
                          ? RaiseOf(WarpLevel(shape.tiling, u.code_pages[page_index]), usual_level)
                          : 0;
    float score = 0;
    for (int h = 0; scored && h < shape.group; ++h) {
      const float x = source.Get(h) * kExpLog2E;
      const float e = ScoreExp2(x - FromOrderedBits(state.reference[h]));
      score = fmaf(e, ScoreHeadWeight(state.mass[h]), score);
      if (shape.by_mass) {
        u.head_bins[h * u.n + first + slot] =
            stray ? kNotFoundBin : static_cast<uint16_t>(__float_as_uint(e) >> kScoreBinShift);
      }
    }
    int bin = static_cast<int>(__float_as_uint(score) >> kScoreBinShift);
    if (weighed) bin = WeighBin(bin, norm, raise);
    slots.Store(slot, static_cast<uint32_t>(bin), histogram);
  }
  __syncthreads();
  AddToGlobal(histogram, kScoreBinCount, u.histogram);
}

}  // namespace spillway::cuda
