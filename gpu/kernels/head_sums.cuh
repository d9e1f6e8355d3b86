#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/degrees.h"
#include "host/core/estimate.h"
#include "host/core/tail_plan.h"

// What a query head's estimate is made of: sets of rows, their splits, and sums over them.
namespace spillway::cuda {

// So few that an SM runs two blocks.
inline constexpr int kEstimateThreads = 384;
inline constexpr int kEstimateBlocksPerSm = 2;
// Places for the splits of all phases: split i of phase p has place p * kSplitMax + i.
inline constexpr int kAllSplitsMax = kPhases * kSplitMax;
static_assert(kAllSplitsMax <= kEstimateThreads && kHeadDimMax <= kEstimateThreads);
// Sets of rows: the exact rows, and at most as many strata as CutStrata() makes.
inline constexpr int kEstimatedStrataMax = kStrataMax;
inline constexpr int kSetsMax = 1 + kEstimatedStrataMax;

// Floats of a set's sums over its splits, relative to the set's maximum: sum x v [d]; for a stratum
// also sum x^2 v [d] and sum x^2 y_a y_b [kProjectedPairs].
__host__ __device__ inline int SetFloats(int head_dim) { return 2 * head_dim + kProjectedPairs; }
// Bytes of shared memory for the sums of all sets.
__host__ __device__ inline size_t HeadSumsBytes(int head_dim) {
  return sizeof(float) * kSetsMax * SetFloats(head_dim);
}

// The places [begin, end) of a set's splits in each phase.
struct SetSplits {
  int16_t begin[kPhases];
  int16_t end[kPhases];

  __device__ int count() const {
    int count = 0;
#pragma unroll
    for (int p = 0; p < kPhases; ++p) count += end[p] - begin[p];
    return count;
  }
  // The place of split i; splits are numbered phase by phase.
  __device__ int place(int i) const {
#pragma unroll
    for (int p = 0; p + 1 < kPhases; ++p) {
      if (i < end[p] - begin[p]) return begin[p] + i;
      i -= end[p] - begin[p];
    }
    return begin[kPhases - 1] + i;
  }
};

// A set of rows, combined over all of its splits.
struct RowSet {
  SetSplits splits;
  int64_t drawn;        // r_h
  int64_t token_count;  // n_h
  float max;
  double factor;  // exp(max - M)
  double rate;    // n_h / r_h; 1 for the exact rows; 0 if no row was drawn
};

// Results for one query head, in shared memory; values in units of HeadStatistics::value_unit.
struct HeadSums : HeadTotals {
  RowSet sets[kSetsMax];
  StratumSpread spreads[kEstimatedStrataMax];
  double outputs[kHeadDimMax];  // o^
};

// Sums over a stratum's projected rows, relative to M; see ProjectedSums.
struct StratumProjection {
  double factor;  // of the stratum's spread in the output's; 0: adds nothing
  double xx;
  double xxy[kProjectionDims];
  double deviation[kProjectionDims];
};

// Sums over the block's threads, in the order of the warps. Every thread gets them.
struct TwoSums {
  double first;
  double second;
};
__device__ inline TwoSums BlockSums(double first, double second) {
  __shared__ TwoSums warps[kEstimateThreads / 32];
  first = WarpSum(first);
  second = WarpSum(second);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = {first, second};
  __syncthreads();
  TwoSums sums = {0, 0};
  for (const TwoSums& part : warps) {
    sums.first += part.first;
    sums.second += part.second;
  }
  return sums;
}

// Calls f(place) for every 32nd split of a set, from split `lane` on.
template <typename F>
__device__ inline void ForSplits(const SetSplits& splits, int lane, F f) {
  const int count = splits.count();
  for (int i = lane; i < count; i += 32) f(splits.place(i));
}

// Sums four elements of a set's vector over its splits `begin`, begin + apart, ..., in order: those
// of the split at place i, at vectors + i * stride, times factor(i). In fp32, like the splits' own
// sums. Several splits are loaded at once, because there are few and the latency of memory is high.
template <typename Factor>
__device__ inline float4 SumFours(const SetSplits& splits, int begin, int apart,
                                  const float* vectors, int64_t stride, Factor factor) {
  constexpr int kTogether = 8;
  const int count = splits.count();
  float4 sum = make_float4(0, 0, 0, 0);
  for (int first = begin; first < count; first += kTogether * apart) {
    float4 v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int split = first + i * apart;
      if (split < count) {
        v[i] = *reinterpret_cast<const float4*>(vectors + splits.place(split) * stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int split = first + i * apart;
      if (split >= count) break;
      const float f = factor(splits.place(split));
      sum.x = fmaf(f, v[i].x, sum.x);
      sum.y = fmaf(f, v[i].y, sum.y);
      sum.z = fmaf(f, v[i].z, sum.z);
      sum.w = fmaf(f, v[i].w, sum.w);
    }
  }
  return sum;
}

}  // namespace spillway::cuda
