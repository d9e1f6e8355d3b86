#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/degrees.h"
#include "host/core/estimate.h"
#include "host/core/tail_plan.h"

// Adds up the sums of the folds' splits for one query head: vectors in fp32, all else in fp64,
// every sum in a fixed order. The formulas are in host/core/estimate.h and degrees.h. One block per
// head.
namespace spillway::cuda {

// So few that an SM runs two blocks.
inline constexpr int kEstimateThreads = 384;
inline constexpr int kEstimateBlocksPerSm = 2;
// Places for the splits of all phases: split i of phase p has place p * kSplitMax + i.
inline constexpr int kAllSplitsMax = kPhases * kSplitMax;
static_assert(kAllSplitsMax <= kEstimateThreads && kHeadDimMax <= kEstimateThreads);
// Sets of rows: the exact rows, and at most as many strata as CutStrata() makes.
inline constexpr int kEstimatedStrataMax = kStratumEdgeCount + 1;
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

// Fills `head` for query head g from the splits of phases [0, phases). totals: HeadSumsBytes() of
// shared memory. All threads.
__device__ inline void EstimateHead(const AttendShape& shape, const UnitRequest& u, int g,
                                    int phases, float* totals, HeadSums& head) {
  // Parts of the strata whose sums S' is made of, and those that have threads of their own.
  constexpr int kSlices = 4;
  constexpr int kOwnSlices = kEstimateThreads / kProjectedPairs;
  constexpr int kWarps = kEstimateThreads / 32;
  __shared__ int16_t set_of[kAllSplitsMax];  // -1: no split
  __shared__ SoftmaxSums sums[kAllSplitsMax];
  __shared__ double factors[kAllSplitsMax];  // exp(split's max - set's max)
  __shared__ StratumProjection projections[kEstimatedStrataMax];
  __shared__ double output_projection[kProjectionDims];
  __shared__ double slices[kSlices][kProjectedPairs];
  const UnitState& s = *u.state;
  RowSet* const sets = head.sets;
  const int d = shape.head_dim;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int set_floats = SetFloats(d);
  const int64_t partial_floats = PartialFloats(shape.group, d);
  // Head g's part of the array [G][width] at offset `first` of a split's partial sums.
  const auto partial = [&](int place, int first, int width) {
    return u.partials + place * partial_floats + first + g * width;
  };

  // Everything but the splits' vectors is loaded at once; what is loaded for places without a split
  // is ignored.
  const int place = threadIdx.x;
  const int phase = place / kSplitMax;
  const int at = place % kSplitMax;
  int own_set = -1;
  if (place < phases * kSplitMax) {
    const int set = s.splits[phase][at].set;
    sums[place] = reinterpret_cast<const SoftmaxSums*>(partial(place, 0, kSumsFloats))[0];
    if (at < s.split_count[phase]) own_set = set;
    set_of[place] = static_cast<int16_t>(own_set);
  }
  if (threadIdx.x < kSetsMax) {
    RowSet set{};
    if (threadIdx.x > 0) {
      const int h = static_cast<int>(threadIdx.x) - 1;
      set.drawn = s.drawn[h];
      set.token_count = s.stratum_count[h];
    }
    set.rate = threadIdx.x == 0 ? 1.0
               : set.drawn > 0  ? StratumRate(set.drawn, set.token_count)
                                : 0.0;
    sets[threadIdx.x] = set;
  }
  const int strata = s.strata;
  __syncthreads();
  if (own_set >= 0) {
    // The splits of a set are adjacent.
    if (at == 0 || set_of[place - 1] != own_set) {
      sets[own_set].splits.begin[phase] = static_cast<int16_t>(place);
    }
    if (at + 1 == kSplitMax || set_of[place + 1] != own_set) {
      sets[own_set].splits.end[phase] = static_cast<int16_t>(place + 1);
    }
  }
  __syncthreads();
  for (int i = warp; i <= strata; i += kWarps) {
    float max = -INFINITY;
    ForSplits(sets[i].splits, lane, [&](int j) { max = fmaxf(max, sums[j].max); });
    max = WarpMax(max);
    if (lane == 0) sets[i].max = max;
  }
  __syncthreads();
  double max = sets[0].max;
  for (int i = 1; i <= strata; ++i) max = fmax(max, static_cast<double>(sets[i].max));
  if (threadIdx.x <= strata) {
    sets[threadIdx.x].factor = exp(static_cast<double>(sets[threadIdx.x].max) - max);
  }
  if (own_set >= 0) {
    factors[place] = exp(static_cast<double>(sums[place].max) - sets[own_set].max);
  }
  __syncthreads();

  // The sets' vectors, four elements at a time; of the exact rows only sum x v.
  const int value_fours = d / 4;
  const int set_fours = set_floats / 4;
  const int values_at = kSumsFloats * shape.group;
  const int squares_at = values_at + shape.group * d;
  const int projected_at = squares_at + shape.group * d;
  // Exact rows have the most splits, so kChains lanes share them.
  constexpr int kChains = 4;
  const int exact_tasks = (kChains * value_fours + 31) / 32 * 32;
  for (int i = threadIdx.x; i < exact_tasks + strata * set_fours; i += kEstimateThreads) {
    if (i < exact_tasks) {  // all lanes of a warp or none
      const int four = i / kChains;
      float4 sum = make_float4(0, 0, 0, 0);
      if (four < value_fours) {
        sum = SumFours(sets[0].splits, i % kChains, kChains,
                       u.partials + values_at + g * d + 4 * four, partial_floats,
                       [&](int j) { return static_cast<float>(factors[j]); });
      }
#pragma unroll
      for (int apart = 1; apart < kChains; apart *= 2) {
        sum.x += __shfl_xor_sync(kFullWarp, sum.x, apart);
        sum.y += __shfl_xor_sync(kFullWarp, sum.y, apart);
        sum.z += __shfl_xor_sync(kFullWarp, sum.z, apart);
        sum.w += __shfl_xor_sync(kFullWarp, sum.w, apart);
      }
      if (i % kChains == 0 && four < value_fours) reinterpret_cast<float4*>(totals)[four] = sum;
      continue;
    }
    const int set = 1 + (i - exact_tasks) / set_fours;
    const int four = (i - exact_tasks) % set_fours;
    const bool squared = four >= value_fours;
    const int first = 4 * four < d       ? values_at + g * d + 4 * four
                      : 4 * four < 2 * d ? squares_at + g * d + 4 * four - d
                                         : projected_at + g * kProjectedPairs + 4 * four - 2 * d;
    reinterpret_cast<float4*>(totals + set * set_floats)[four] =
        SumFours(sets[set].splits, 0, 1, u.partials + first, partial_floats, [&](int j) {
          const auto f = static_cast<float>(factors[j]);
          return squared ? f * f : f;
        });
  }
  double part = 0;
  if (own_set >= 0) {
    const RowSet& set = sets[own_set];
    part = set.rate * set.factor * factors[place] * sums[place].sum;
  }
  // Its barriers also complete the vectors in `totals`.
  const auto [all, exact] = BlockSums(part, own_set == 0 ? part : 0.0);

  double norm_sq = 0;
  if (threadIdx.x < d) {
    double numerator = 0;
    for (int i = 0; i <= strata; ++i) {
      numerator += sets[i].rate * sets[i].factor * totals[i * set_floats + threadIdx.x];
    }
    head.outputs[threadIdx.x] = numerator / all;
    norm_sq = numerator * numerator;
  }
  norm_sq = BlockSums(norm_sq, 0).first;

  // One warp per stratum.
  const double o_norm_sq = norm_sq / (all * all);
  for (int h = warp; h < strata; h += kWarps) {
    const RowSet& set = sets[1 + h];
    const float* own = totals + (1 + h) * set_floats;
    const double factor_sq = set.factor * set.factor;
    StratumMoments m{};
    ForSplits(set.splits, lane, [&](int j) {
      const double f = set.factor * factors[j];
      m.sum_x += f * sums[j].sum;
      m.sum_xx += f * f * sums[j].sum_sq;
      m.sum_xxvv += f * f * sums[j].sum_sq_norm;
    });
    m.sum_x = WarpSum(m.sum_x);
    m.sum_xx = WarpSum(m.sum_xx);
    m.sum_xxvv = WarpSum(m.sum_xxvv);
    double deviation = 0, xxy = 0, oy = 0;  // of y_m, m = lane % 16
    for (int i = lane; i < d; i += 32) {
      const double o = head.outputs[i];
      const double xv = set.factor * own[i];
      const double xvo = xv - o * m.sum_x;
      const double xxv = factor_sq * own[d + i];
      m.sum_xv_sq += xv * xv;
      m.sum_xvo_sq += xvo * xvo;
      m.o_dot_sum_xxv += o * xxv;
      deviation += u.signs.Of(i, xvo);
      xxy += u.signs.Of(i, xxv);
      oy += u.signs.Of(i, o);
    }
    static_assert(kProjectionDims == 16);
    deviation += __shfl_xor_sync(kFullWarp, deviation, 16);
    xxy += __shfl_xor_sync(kFullWarp, xxy, 16);
    oy += __shfl_xor_sync(kFullWarp, oy, 16);
    m.sum_xv_sq = WarpSum(m.sum_xv_sq);
    m.sum_xvo_sq = WarpSum(m.sum_xvo_sq);
    m.o_dot_sum_xxv = WarpSum(m.o_dot_sum_xxv);
    if (lane < kProjectionDims) {
      projections[h].deviation[lane] = deviation;
      projections[h].xxy[lane] = xxy;
      if (h == 0) output_projection[lane] = oy;
    }
    if (lane == 0) {
      const bool sampled = set.drawn >= 2 && set.drawn < set.token_count;
      projections[h].factor =
          sampled ? SpreadFactor(set.drawn, set.token_count) / static_cast<double>(set.drawn - 1)
                  : 0.0;
      projections[h].xx = m.sum_xx;
      head.spreads[h] = SpreadOf(set.drawn, set.token_count, m, o_norm_sq);
    }
  }
  __syncthreads();

  // S': one thread per entry and slice.
  const int pair = threadIdx.x % kProjectedPairs;
  const int own_slice = threadIdx.x / kProjectedPairs;
  const int a = pair % kProjectionDims;
  const int b = (a + pair / kProjectionDims) % kProjectionDims;
  for (int slice = own_slice; own_slice < kOwnSlices && slice < kSlices; slice += kOwnSlices) {
    double entry = 0;
    for (int h = slice; h < strata; h += kSlices) {
      const RowSet& set = sets[1 + h];
      const StratumProjection& p = projections[h];
      if (p.factor == 0) continue;
      const ProjectedSums of_pair = {
          set.factor * set.factor * totals[(1 + h) * set_floats + 2 * d + pair],
          p.xxy[a],
          p.xxy[b],
          p.xx,
          p.deviation[a],
          p.deviation[b]};
      entry += p.factor * ProjectedSpread(of_pair, output_projection[a], output_projection[b],
                                          static_cast<double>(set.drawn));
    }
    slices[slice][pair] = entry;
  }
  __syncthreads();
  double trace = 0, square = 0;
  if (threadIdx.x < kProjectedPairs) {
    double entry = 0;
    for (int k = 0; k < kSlices; ++k) entry += slices[k][threadIdx.x];
    const bool diagonal = threadIdx.x < kProjectionDims;
    if (diagonal) trace = entry;
    square = (diagonal ? 1 : 2) * entry * entry;
  }
  const TwoSums covariance = BlockSums(trace, square);
  if (warp == 0) {
    SampleVariance variance{};
    for (int h = lane; h < strata; h += 32) {
      variance.Add(sets[1 + h].drawn, sets[1 + h].token_count, head.spreads[h]);
    }
    variance.of_output = WarpSum(variance.of_output);
    variance.of_numerator = WarpSum(variance.of_numerator);
    if (lane == 0) {
      head.max = max;
      head.denominator = all;
      head.exact_denominator = exact;
      head.norm_sq = norm_sq;
      head.norm_sq_unbiased = UnbiasedNormSq(norm_sq, variance.of_numerator);
      head.variance = variance.of_output;
      head.degrees = DegreesOfFreedom(variance.of_output, covariance.first, covariance.second);
    }
  }
  __syncthreads();
}

}  // namespace spillway::cuda
