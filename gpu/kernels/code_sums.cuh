#pragma once

#include "gpu/kernels/code_summer.cuh"
#include "gpu/kernels/page_weigher.cuh"

// Of coded units: what codes give for the tail, and how far rows may be from it
// (host/core/value_code.h). One block per span of pages. Every sum is made in an order that depends
// on the unit alone.
namespace spillway::cuda {

// Adds up the warps' predictions, [kSpanParts][2][kStrataMax][G]. All threads.
__device__ inline void AddPredictions(const AttendShape& shape, const UnitRequest& u, int strata,
                                      const SpanPages& pages, const float* predicted) {
  const int group = shape.group;
  for (int i = threadIdx.x; i < strata * group; i += kSpanThreads) {
    PredictedPart sum = {0, 0, pages.counted[i / group]};
#pragma unroll
    for (int warp = 0; warp < kSpanParts; ++warp) {
      sum.of_value += predicted[warp * 2 * kStrataMax * group + i];
      sum.of_centre += predicted[(warp * 2 + 1) * kStrataMax * group + i];
    }
    u.codes.predicted[int64_t{blockIdx.x} * kStrataMax * group + i] = sum;
  }
}

// Sums x^, x^ c and x^ ||c||^2 over a span's pages, with c the pages' value centres. to: of head 0;
// heads are `stride` apart. memory: [G][kSpanThreads] and [kSpanParts][kGroupMax] floats. All
// threads; needs a barrier before it.
template <int kHeads>
__device__ inline void SumCentres(const AttendShape& shape, const UnitRequest& u,
                                  const SpanPages& pages, float* memory, float* to,
                                  int64_t stride) {
  const int d = shape.head_dim;
  const int padded = (d + 31) / 32 * 32;
  const int slices = kSpanThreads / padded;
  const int i = static_cast<int>(threadIdx.x) % padded;
  const int slice = static_cast<int>(threadIdx.x) / padded;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float inverse_unit = 1 / ValueUnit(u);
  float sum[kHeads] = {}, square[kHeads] = {};
  if (i < d && slice < slices) {
#pragma unroll 4
    for (int page = slice; page < pages.place.count; page += slices) {
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
  float* const squares = memory + kSpanThreads * shape.group;
#pragma unroll
  for (int g = 0; g < kHeads; ++g) {
    if (g >= shape.group) break;
    memory[g * kSpanThreads + threadIdx.x] = sum[g];
  }
  const float of_warp = ReduceByLane(square, [](float a, float b) { return a + b; });
  if (lane % (32 / kHeads) == 0) squares[warp * kGroupMax + lane / (32 / kHeads)] = of_warp;
  __syncthreads();
  for (int j = threadIdx.x; j < shape.group * padded; j += kSpanThreads) {
    const int g = j / padded;
    if (j % padded >= d) continue;
    float all = 0;
    for (int s = 0; s < slices; ++s) all += memory[g * kSpanThreads + s * padded + j % padded];
    to[g * stride + j % padded] = all;
  }
  for (int g = warp; g < shape.group; g += kSpanParts) {
    const float of_squares = WarpSum(lane < kSpanParts ? squares[lane * kGroupMax + g] : 0.0f);
    const float of_pages = WarpSum(lane < pages.place.count ? pages.sums[lane][g] : 0.0f);
    if (lane == 0) {
      to[g * stride + d] = of_squares;
      to[g * stride + d + 1] = of_pages;
    }
  }
}

// One pass over the codes of the pages that have mass: kSummedDims dimensions of a part. All
// threads; ends with a barrier.
template <int kWidth, int kHeads>
__device__ inline void SumPart(const AttendShape& shape, const UnitRequest& u,
                               const SpanPages& pages, int part, int first_word,
                               const uint32_t* weights, uint32_t* stages, uint32_t mass, float* to,
                               int64_t stride) {
  using Summer = CodeSummer<kWidth, kHeads>;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Summer summer(shape, u, pages, part, first_word, weights, stages + warp * 2 * kStageWords, mass);
  summer.AddAll();
  __syncthreads();
  auto* const sums = reinterpret_cast<float*>(stages);  // [kSpanParts][G][kSummedDims]
  summer.Store(sums + warp * shape.group * kSummedDims);
  __syncthreads();
  const int words = shape.tiling.value_words(part);
  for (int i = threadIdx.x; i < shape.group * kSummedDims; i += kSpanThreads) {
    const int g = i / kSummedDims;
    const int at = Summer::SumAt(g, i % kSummedDims);
    const int word = first_word + i % Summer::kRunWords;
    const int field = i % kSummedDims / Summer::kRunWords;
    if (word >= words) continue;
    float all = 0;
#pragma unroll
    for (int w = 0; w < kSpanParts; ++w) all += sums[w * shape.group * kSummedDims + at];
    to[g * stride + shape.head_dim + 4 + part * shape.head_dim + field * words + word] = all;
  }
  __syncthreads();
}

// Weighs the span's pages, which SpanLoader copies, and predicts variances: predicted
// [kSpanParts][2][kStrataMax][G], by warp. All threads; ends with a barrier.
template <int kHeads>
__device__ inline void WeighSpan(const AttendShape& shape, const UnitRequest& u, int strata,
                                 const TailBins& tail, uint32_t* weights, uint32_t* stages,
                                 SpanPages& pages, uint32_t mass, float* predicted) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto& weighed = *reinterpret_cast<WeighedPages*>(stages + (warp * 2 + 1) * kStageWords);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  PageWeigher weigher(shape, u, tail, weights, weighed, pages, mass);
  SpanPredictor<kHeads> predictor(shape, u, pages, strata, weights, weighed, mass);
  predictor.Add(weigher.FindTail());
  __syncwarp();
  weigher.Weigh();
  predictor.Store(predicted + warp * 2 * kStrataMax * shape.group);
  __syncthreads();
}

// Weighs the tail's tokens, predicts variances, and sums the codes of the pages that have mass and
// all pages' centres. Grid (spans, units). Shared memory: SpanLayout.
template <int kHeads>
__global__ void __launch_bounds__(kSpanThreads, kHeads <= 8 ? 2 : 1)
    SumCodesKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) std::byte span_memory[];
  __shared__ TailBins tail;
  __shared__ SpanPages pages;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const int strata = u.state->strata;
  if (!u.coded() || strata == 0 || blockIdx.x >= u.spans()) return;
  const SpanLayout at(shape);
  auto* const weights = reinterpret_cast<uint32_t*>(span_memory + at.weights);
  auto* const stages = reinterpret_cast<uint32_t*>(span_memory + at.stages);
  auto* const predicted = reinterpret_cast<float*>(span_memory + at.predicted);
  const SpanPlace place = SpanPlace::Of(u, static_cast<int>(blockIdx.x));
  SpanLoader(shape, u, place).Load(span_memory, at, pages, tail);
  const uint32_t mass = pages.MassMask();
  const CodeTiling& tiling = shape.tiling;
  const int64_t stride = SpanFloats(shape.head_dim, tiling.value_parts());
  float* const to = u.codes.sums + int64_t{blockIdx.x} * shape.group * stride;
  WeighSpan<kHeads>(shape, u, strata, tail, weights, stages, pages, mass, predicted);
  AddPredictions(shape, u, strata, pages, predicted);
  __syncthreads();
  SumCentres<kHeads>(shape, u, pages, predicted, to, stride);
  for (int part = 0; part < tiling.value_parts(); ++part) {
    const int run_words = kSummedDims * tiling.value_width(part) / 8;
    for (int word = 0; word < tiling.value_words(part); word += run_words) {
      if (tiling.value_width(part) == 2) {
        SumPart<2, kHeads>(shape, u, pages, part, word, weights, stages, mass, to, stride);
      } else {
        SumPart<1, kHeads>(shape, u, pages, part, word, weights, stages, mass, to, stride);
      }
    }
  }
}

}  // namespace spillway::cuda
