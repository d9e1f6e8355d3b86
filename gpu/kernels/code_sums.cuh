#pragma once

#include "gpu/kernels/code_summer.cuh"
#include "gpu/kernels/page_weigher.cuh"

// Of coded units: what codes give for the tail, and how far rows may be from it
// (host/core/value_code.h). One block per span of pages. Every sum is made in an order that depends
// on the unit alone.
namespace spillway::cuda {

// Fills what is known of a span before its pages are weighed. All threads; ends with a barrier.
__device__ inline void LoadSpan(const AttendShape& shape, const UnitRequest& u, int span,
                                SpanPages& pages) {
  const int64_t page_count = u.scored_page_end() - u.scored_page_begin();
  const int64_t step = u.spans();
  const int64_t first = u.scored_page_begin() + span;
  const int count = static_cast<int>((page_count - span + step - 1) / step);
  if (threadIdx.x == 0) {
    pages.first = first;
    pages.step = step;
    pages.count = count;
  }
  for (int i = threadIdx.x; i < count; i += kSpanThreads) {
    const int64_t page = first + i * step;
    pages.codes[i] = u.code_pages[page];
    bool has_mass = false;
    for (int g = 0; g < shape.group; ++g) {
      has_mass |= PageHasMass(u.rank_sums[page * shape.group + g].weight, u.state->score_sum[g],
                              page_count);
    }
    pages.has_mass[i] = has_mass;
  }
  __syncthreads();
}

// Sums x^, x^ c and x^ ||c||^2 over a span's pages, with c the pages' value centres. to: of head 0;
// heads are `stride` apart. memory: [kSpanThreads + kSpanParts] floats. All threads.
template <int kHeads>
__device__ inline void SumCentres(const AttendShape& shape, const UnitRequest& u,
                                  const SpanPages& pages, float* memory, float* to,
                                  int64_t stride) {
  const int d = shape.head_dim;
  const int padded = (d + 31) / 32 * 32;
  const int slices = kSpanThreads / padded;
  const int i = static_cast<int>(threadIdx.x) % padded;
  const int slice = static_cast<int>(threadIdx.x) / padded;
  const float inverse_unit = 1 / ValueUnit(u);
  float sum[kHeads] = {}, square[kHeads] = {};
  if (i < d && slice < slices) {
#pragma unroll 4
    for (int page = slice; page < pages.count; page += slices) {
      const auto* centre = reinterpret_cast<const uint16_t*>(
          pages.codes[page] + shape.tiling.value_centre_offset_bytes());
      const float c = BFloat16ToFloat(centre[i]) * inverse_unit;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        if (g >= shape.group) break;
        const float product = pages.sums[page][g] * c;
        sum[g] += product;
        square[g] = fmaf(product, c, square[g]);
      }
    }
  }
  float* const squares = memory + kSpanThreads;
#pragma unroll
  for (int g = 0; g < kHeads; ++g) {
    if (g >= shape.group) break;
    const float of_warp = WarpSum(square[g]);
    __syncthreads();
    memory[threadIdx.x] = sum[g];
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < d) {
      float all = 0;
      for (int s = 0; s < slices; ++s) all += memory[s * padded + threadIdx.x];
      to[g * stride + threadIdx.x] = all;
    }
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      float all = 0;
      for (int w = 0; w < kSpanParts; ++w) all += squares[w];
      static_assert(kSpanPages == 32);
      const float of_pages = WarpSum(lane < pages.count ? pages.sums[lane][g] : 0.0f);
      if (lane == 0) {
        to[g * stride + d] = all;
        to[g * stride + d + 1] = of_pages;
      }
    }
  }
  __syncthreads();
}

// One pass over the codes of the pages that have mass: kSummedDims dimensions of a part. sums
// [kHeads][kHeadDimMax]: shared memory. between(): what may run while the first pages are on their
// way; it ends with a barrier. All threads.
template <int kWidth, int kHeads, typename Between>
__device__ inline void SumPart(const AttendShape& shape, const UnitRequest& u,
                               const SpanPages& pages, int part, int first_word,
                               const uint32_t* weights, uint32_t* codes, float* sums, float* to,
                               int64_t stride, Between between) {
  using Summer = CodeSummer<kWidth, kHeads>;
  const int warp = threadIdx.x / 32;
  Summer summer(shape, u, pages, part, first_word, weights,
                codes + warp * 2 * kPageRows * kRunWordsMax);
  summer.Begin();
  between();
  summer.AddAll();
  for (int i = threadIdx.x; i < kHeads * kHeadDimMax; i += kSpanThreads) sums[i] = 0;
  for (int w = 0; w < kSpanParts; ++w) {
    __syncthreads();
    if (warp == w) summer.AddTo(sums);
  }
  __syncthreads();
  const int d = shape.head_dim;
  const int words = shape.tiling.value_words(part);
  for (int i = threadIdx.x; i < shape.group * d; i += kSpanThreads) {
    const int word = i % d % words;
    if (word < first_word || word >= first_word + Summer::kRunWords) continue;
    const int g = i / d;
    to[g * stride + d + 4 + part * d + i % d] = sums[g * kHeadDimMax + i % d];
  }
  __syncthreads();
}

// Weighs the tail's tokens, predicts variances, and sums the codes of the pages that have mass and
// all pages' centres; sets to 0 the levels of tokens outside the tail. Grid (spans, units). Shared
// memory: SpanLayout.
template <int kHeads>
__global__ void __launch_bounds__(kSpanThreads, kHeads == 8 ? 2 : 1)
    SumCodesKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) std::byte span_memory[];
  __shared__ float shrinkage[kGroupMax];
  __shared__ TailBins tail;
  __shared__ SpanPages pages;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& state = *u.state;
  const int strata = state.strata;
  if (!u.coded() || strata == 0 || blockIdx.x >= u.spans()) return;
  const SpanLayout at(shape);
  auto* const weights = reinterpret_cast<uint32_t*>(span_memory + at.weights);
  auto* const codes = reinterpret_cast<uint32_t*>(span_memory + at.codes);
  auto* const classes = reinterpret_cast<uint8_t*>(span_memory + at.classes);
  auto* const predicted = reinterpret_cast<PredictedPart*>(span_memory + at.predicted);
  auto* const sums = reinterpret_cast<float*>(span_memory + at.classes);
  const int width = strata * shape.group;
  for (int i = threadIdx.x; i < ClassBytes(shape.bin_count) / 16; i += kSpanThreads) {
    reinterpret_cast<uint4*>(classes)[i] = reinterpret_cast<const uint4*>(u.class_of_bin)[i];
  }
  for (int i = threadIdx.x; i < kSpanParts * width; i += kSpanThreads) predicted[i] = {0, 0, 0};
  if (static_cast<int>(threadIdx.x) < shape.group) {
    shrinkage[threadIdx.x] = LevelShrinkage(state.rank_error_scale[threadIdx.x]);
  }
  if (threadIdx.x == 0) {
    int near = 0;
    while (near < strata && state.stratum_count[near] <= kNearStratumTokens) ++near;
    tail = {classes, shape.bin_count, state.tie_class, state.heavy_from, near};
  }
  LoadSpan(shape, u, static_cast<int>(blockIdx.x), pages);
  const int d = shape.head_dim;
  const CodeTiling& tiling = shape.tiling;
  const int64_t stride = SpanFloats(d, tiling.value_parts());
  float* const to = u.codes.sums + int64_t{blockIdx.x} * shape.group * stride;
  const auto weigh = [&] {
    const int warp = threadIdx.x / 32;
    PageWeigher weigher(shape, u, tail, shrinkage, predicted + warp * width, weights, pages);
    for (int i = warp; i < pages.count; i += kSpanParts) {
      weigher.Weigh(pages.first + i * pages.step, i);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += kSpanThreads) {
      PredictedPart sum = {0, 0, 0};
      for (int part = 0; part < kSpanParts; ++part) {
        const PredictedPart of_part = predicted[part * width + i];
        sum.of_value += of_part.of_value;
        sum.of_centre += of_part.of_centre;
        sum.count += of_part.count;
      }
      u.codes.predicted[int64_t{blockIdx.x} * kStrataMax * shape.group + i] = sum;
    }
    __syncthreads();
    SumCentres<kHeads>(shape, u, pages, sums, to, stride);
  };
  bool weighed = false;
  for (int part = 0; part < tiling.value_parts(); ++part) {
    const int run_words = kSummedDims * tiling.value_width(part) / 8;
    for (int word = 0; word < tiling.value_words(part); word += run_words) {
      const auto between = [&] {
        if (!weighed) weigh();
        weighed = true;
      };
      if (tiling.value_width(part) == 2) {
        SumPart<2, kHeads>(shape, u, pages, part, word, weights, codes, sums, to, stride, between);
      } else {
        SumPart<1, kHeads>(shape, u, pages, part, word, weights, codes, sums, to, stride, between);
      }
    }
  }
}

}  // namespace spillway::cuda
