#pragma once

#include "gpu/kernels/hadamard.cuh"
#include "gpu/kernels/head_sums.cuh"

// Adds up the spans of a coded unit: what codes give for the tail, for one query head.
namespace spillway::cuda {

// What codes give, for a head's estimate; CodeSums of host/core/head_estimate.h.
struct HeadCodes {
  double reference;
  double sum;  // 0: codes give nothing
  double centre_square;
  const float* value;              // [d]
  const float* centre;             // [d]
  const PredictedSums* predicted;  // [strata]; null: the unit is not coded, or has no tail
};

__device__ inline CodeTotals& TotalsOf(const AttendShape& shape, const UnitRequest& u, int g) {
  return *reinterpret_cast<CodeTotals*>(u.codes.totals + g * CodeTotalsBytes(shape.head_dim));
}
__device__ inline float* VectorsOf(CodeTotals& totals) {
  return reinterpret_cast<float*>(&totals + 1);
}

// The totals of head g, which TotalCodes() has set.
__device__ inline HeadCodes CodesOf(const AttendShape& shape, const UnitRequest& u, int g) {
  if (!u.coded() || u.state->strata == 0) return HeadCodes{};
  CodeTotals& totals = TotalsOf(shape, u, g);
  const float* const vectors = VectorsOf(totals);
  return {totals.reference,         totals.sum,      totals.centre_square, vectors,
          vectors + shape.head_dim, totals.predicted};
}

// Sets the totals of head g. Does nothing if the unit is not coded, or has no tail. A block of
// kEstimateThreads; ends with a barrier.
__device__ inline void TotalCodes(const AttendShape& shape, const UnitRequest& u, int g) {
  __shared__ float turned[kHeadDimMax];
  const UnitState& s = *u.state;
  if (!u.coded() || s.strata == 0) return;
  const int d = shape.head_dim;
  const int parts = shape.tiling.value_parts();
  const int64_t spans = u.spans();
  const int64_t stride = SpanFloats(d, parts);
  const float* const sums = u.codes.sums + g * stride;
  CodeTotals& totals = TotalsOf(shape, u, g);
  float* const vectors = VectorsOf(totals);
  const int i = static_cast<int>(threadIdx.x);
  double centre = 0;
  if (i < d) {
    double code = 0;
#pragma unroll 4
    for (int64_t span = 0; span < spans; ++span) {
      const float* const of_span = sums + span * shape.group * stride;
      centre += of_span[i];
      for (int part = 0; part < parts; ++part) code += of_span[d + 4 + part * d + i];
    }
    turned[i] = static_cast<float>(code);
    vectors[d + i] = static_cast<float>(centre);
  } else if (i >= kHeadDimMax && i < kHeadDimMax + s.strata) {
    const int h = i - kHeadDimMax;
    PredictedSums sum;
    for (int64_t span = 0; span < spans; ++span) {
      const PredictedPart part = u.codes.predicted[(span * kStrataMax + h) * shape.group + g];
      sum.of_value += part.of_value;
      sum.of_centre += part.of_centre;
      sum.count += part.count;
    }
    totals.predicted[h] = sum;
  } else if (i == kEstimateThreads - 1) {
    double square = 0, sum = 0;
    for (int64_t span = 0; span < spans; ++span) {
      square += sums[span * shape.group * stride + d];
      sum += sums[span * shape.group * stride + d + 1];
    }
    totals.centre_square = square;
    totals.sum = sum;
    totals.reference = LevelLogit(kLevelZero, FromOrderedBits(s.reference[g]));
  }
  __syncthreads();
  UndoHadamard(d, turned, i, kEstimateThreads, [] { __syncthreads(); });
  if (i < d) vectors[i] = static_cast<float>(centre + turned[i]);
  __syncthreads();
}
static_assert(kHeadDimMax + kStrataMax < kEstimateThreads);

}  // namespace spillway::cuda
