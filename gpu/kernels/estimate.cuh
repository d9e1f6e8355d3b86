#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/budget.h"
#include "host/core/neyman.h"

// What a unit's sums say: budgets after the pilot, output and certificate at
// the end. fp64, every sum in one order; the formulas are host/core/estimate.h
// and DESIGN's.
namespace spillway::cuda {

inline constexpr int kEstimateThreads = 1024;

// What is known of each query head, in shared memory.
struct HeadSums {
  double max;
  double denominator;
  double exact_denominator;
  double norm_sq;
  double norm_sq_unbiased;
  double variance;
};

// Per (head, stratum).
struct StratumSums {
  double trace_o;
  double trace_n;
  double variance_x;
};

// Segments of both phases up to `phases`, as one sequence.
struct SegmentRange {
  const UnitRequest& u;
  int phases;

  __device__ int count() const {
    return u.state->segment_count[0] + (phases > 1 ? u.state->segment_count[1] : 0);
  }
  __device__ Segment segment(int i) const {
    const int first = u.state->segment_count[0];
    return i < first ? u.state->segments[0][i] : u.state->segments[1][i - first];
  }
  __device__ const float* partial(int i, const AttendShape& shape) const {
    const int first = u.state->segment_count[0];
    const int64_t slot = i < first ? i : kSegmentMax + (i - first);
    return u.partials + slot * PartialFloats(shape.group, shape.head_dim);
  }
};

// n_h / r_h of a segment's set, times exp(max - M).
__device__ inline double SetRate(const UnitState& s, int set) {
  return set == 0 ? 1.0
                  : static_cast<double>(s.stratum_count[set - 1]) /
                        static_cast<double>(s.drawn[set - 1]);
}

// Shared memory of EstimateUnit: numerators [G][d], factors [2 kSegmentMax][G]
// as doubles, strata [G][kTailStrataMax].
__host__ __device__ inline int64_t EstimateBytes(int group, int head_dim) {
  return int64_t{8} * group * head_dim + int64_t{8} * 2 * kSegmentMax * group +
         int64_t{sizeof(StratumSums)} * group * kTailStrataMax;
}

// Fills heads [G], strata [G][kTailStrataMax] and the numerators N^ [G][d].
// All threads of the block.
__device__ inline void EstimateUnit(const AttendShape& shape, const UnitRequest& u, int phases,
                                    HeadSums* heads, StratumSums* strata, double* numerators,
                                    double* factors) {
  const UnitState& s = *u.state;
  const int group = shape.group;
  const int d = shape.head_dim;
  const SegmentRange range{u, phases};
  const int segments = range.count();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;

  for (int g = warp; g < group; g += warps) {
    float max = -INFINITY;
    for (int i = lane; i < segments; i += 32) max = fmaxf(max, range.partial(i, shape)[4 * g]);
    for (int offset = 16; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
    }
    if (lane == 0) heads[g].max = max;
  }
  __syncthreads();
  // factors[i][g]: exp(max_i - M).
  for (int i = threadIdx.x; i < segments * group; i += blockDim.x) {
    const float* partial = range.partial(i / group, shape);
    factors[i] = exp(static_cast<double>(partial[4 * (i % group)]) - heads[i % group].max);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
    const int g = i / d;
    double sum = 0;
    for (int j = 0; j < segments; ++j) {
      const double rate = SetRate(s, range.segment(j).set);
      sum += rate * factors[j * group + g] * range.partial(j, shape)[4 * group + i];
    }
    numerators[i] = sum;
  }
  for (int g = threadIdx.x; g < group; g += blockDim.x) {
    double exact = 0, all = 0;
    for (int j = 0; j < segments; ++j) {
      const int set = range.segment(j).set;
      const double part =
          SetRate(s, set) * factors[j * group + g] * range.partial(j, shape)[4 * g + 1];
      all += part;
      if (set == 0) exact += part;
    }
    heads[g].denominator = all;
    heads[g].exact_denominator = exact;
  }
  __syncthreads();
  for (int g = warp; g < group; g += warps) {
    double norm_sq = 0;
    for (int i = lane; i < d; i += 32) norm_sq += numerators[g * d + i] * numerators[g * d + i];
    norm_sq = WarpSum(norm_sq);
    if (lane == 0) heads[g].norm_sq = norm_sq;
  }
  __syncthreads();

  // A warp a (head, stratum).
  for (int pair = warp; pair < group * s.strata; pair += warps) {
    const int g = pair % group;
    const int h = pair / group;
    StratumSums& out = strata[g * kTailStrataMax + h];
    const double r = static_cast<double>(s.drawn[h]);
    if (s.drawn[h] < 2) {
      const double unknown = s.drawn[h] == s.stratum_count[h] || s.drawn[h] == 0 ? 0.0 : HUGE_VAL;
      if (lane == 0) out = {unknown, unknown, unknown};
      continue;
    }
    double sx = 0, sxx = 0, sxxvv = 0;
    double mean_n_sq = 0, mean_o_sq = 0, cross = 0;
    const double denominator = heads[g].denominator;
    for (int j = 0; j < segments; ++j) {
      if (range.segment(j).set != 1 + h) continue;
      const float* partial = range.partial(j, shape);
      const double f = factors[j * group + g];
      sx += f * partial[4 * g + 1];
      sxx += f * f * partial[4 * g + 2];
      sxxvv += f * f * partial[4 * g + 3];
    }
    for (int i = lane; i < d; i += 32) {
      double sxv = 0, sxxv = 0;
      for (int j = 0; j < segments; ++j) {
        if (range.segment(j).set != 1 + h) continue;
        const float* value = range.partial(j, shape) + 4 * group + g * d + i;
        const double f = factors[j * group + g];
        sxv += f * value[0];
        sxxv += f * f * value[group * d];
      }
      const double o = numerators[g * d + i] / denominator;
      mean_n_sq += sxv * sxv;
      mean_o_sq += (sxv - o * sx) * (sxv - o * sx);
      cross += o * sxxv;
    }
    mean_n_sq = WarpSum(mean_n_sq);
    mean_o_sq = WarpSum(mean_o_sq);
    cross = WarpSum(cross);
    if (lane == 0) {
      const double o_norm_sq = heads[g].norm_sq / (denominator * denominator);
      // Rounding may leave a little below 0; sums that passed fp32's range
      // are known to say nothing.
      const auto settled = [](double v) { return isfinite(v) ? fmax(0.0, v) : HUGE_VAL; };
      out.trace_n = settled((sxxvv - mean_n_sq / r) / (r - 1));
      out.trace_o = settled((sxxvv - 2 * cross + o_norm_sq * sxx - mean_o_sq / r) / (r - 1));
      out.variance_x = settled((sxx - sx * sx / r) / (r - 1));
    }
  }
  __syncthreads();
  for (int g = threadIdx.x; g < group; g += blockDim.x) {
    double variance = 0, norm_variance = 0;
    for (int h = 0; h < s.strata; ++h) {
      if (s.drawn[h] == 0 || s.drawn[h] >= s.stratum_count[h]) continue;
      const double n = static_cast<double>(s.stratum_count[h]);
      const double spread = n * n * (1 / static_cast<double>(s.drawn[h]) - 1 / n);
      variance += spread * strata[g * kTailStrataMax + h].trace_o;
      norm_variance += spread * strata[g * kTailStrataMax + h].trace_n;
    }
    heads[g].variance = variance;
    heads[g].norm_sq_unbiased = fmax(0.0, heads[g].norm_sq - norm_variance);
  }
  __syncthreads();
}

// Rows per stratum that one head's bound asks for.
__device__ inline void HeadBudgets(const UnitRequest& u, const HeadSums& head,
                                   const StratumSums* strata, int64_t* budgets) {
  const UnitState& s = *u.state;
  // Nothing can be said of the error without reading every row.
  if (!(head.norm_sq_unbiased > 0) || !isfinite(head.variance)) {
    for (int h = 0; h < s.strata; ++h) budgets[h] = s.stratum_count[h];
    return;
  }
  if (u.tail == Tail::kUniform) {
    const UniformTail tail{static_cast<double>(s.stratum_count[0]),
                           u.inflation * sqrt(strata[0].variance_x),
                           u.inflation * u.inflation * strata[0].trace_n,
                           u.inflation * u.inflation * strata[0].trace_o,
                           sqrt(head.norm_sq_unbiased),
                           head.denominator};
    budgets[0] = FinitePopulation(UniformBudget(u.bound, tail, u.epsilon, u.bound_z),
                                  s.stratum_count[0], s.drawn[0]);
    return;
  }
  NeymanStratum neyman[kTailStrataMax];
  for (int h = 0; h < s.strata; ++h) {
    neyman[h].token_count = s.stratum_count[h];
    neyman[h].floor = s.drawn[h];
    neyman[h].deviation = u.inflation * sqrt(strata[h].trace_o);
  }
  NeymanAllot(std::span<const NeymanStratum>(neyman, s.strata),
              u.epsilon * u.epsilon * head.norm_sq_unbiased / (u.z * u.z),
              std::span<int64_t>(budgets, s.strata));
}

// Budgets of phase 1. One block a unit; shared memory: EstimateBytes().
__global__ void __launch_bounds__(kEstimateThreads)
    BudgetKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) double doubles[];
  __shared__ HeadSums heads[kGroupMax];
  __shared__ int64_t budgets[kGroupMax][kTailStrataMax];
  const UnitRequest& u = units[blockIdx.x];
  UnitState& s = *u.state;
  const int strata_count = s.strata;
  // Nothing to draw, or nothing that would be answered.
  bool sampled = s.error_token == kNoToken;
  int64_t drawn = 0;
  for (int h = 0; h < strata_count; ++h) drawn += s.drawn[h];
  sampled = sampled && drawn > 0;
  if (sampled) {
    double* numerators = doubles;
    double* factors = numerators + shape.group * shape.head_dim;
    auto* strata = reinterpret_cast<StratumSums*>(factors + 2 * kSegmentMax * shape.group);
    EstimateUnit(shape, u, 1, heads, strata, numerators, factors);
    for (int g = threadIdx.x; g < shape.group; g += blockDim.x) {
      HeadBudgets(u, heads[g], strata + g * kTailStrataMax, budgets[g]);
    }
    __syncthreads();
    for (int h = threadIdx.x; h < strata_count; h += blockDim.x) {
      int64_t most = 0;
      for (int g = 0; g < shape.group; ++g) most = max(most, budgets[g][h]);
      s.budget[h] = most;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t total = 0;
      for (int h = 0; h < strata_count; ++h) total += s.budget[h];
      if (total > s.rows_left) {
        // What the pilot drew is spent; the rest is shared in proportion.
        s.limited = 1;
        const double share = static_cast<double>(s.rows_left - drawn) /
                             static_cast<double>(max(int64_t{1}, total - drawn));
        for (int h = 0; h < strata_count; ++h) {
          const int64_t have = s.drawn[h];
          s.budget[h] =
              have + static_cast<int64_t>(share * static_cast<double>(s.budget[h] - have));
        }
      }
    }
    __syncthreads();
  }
  for (int h = threadIdx.x; h < strata_count; h += blockDim.x) {
    s.drawn_threshold[h] = s.threshold[h];
    if (sampled) {
      s.threshold[h] =
          max(s.threshold[h],
              static_cast<unsigned long long>(SampleThreshold(s.budget[h], s.stratum_count[h])));
    }
    s.collected[h] = s.threshold[h];
  }
}

// Output and certificate. One block a unit; shared memory: EstimateBytes().
__global__ void __launch_bounds__(kEstimateThreads)
    FinishKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) double doubles[];
  __shared__ HeadSums heads[kGroupMax];
  const UnitRequest& u = units[blockIdx.x];
  const UnitState& s = *u.state;
  double* numerators = doubles;
  double* factors = numerators + shape.group * shape.head_dim;
  auto* strata = reinterpret_cast<StratumSums*>(factors + 2 * kSegmentMax * shape.group);
  EstimateUnit(shape, u, 2, heads, strata, numerators, factors);
  if (u.out != nullptr) {
    for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
      u.out[i] = static_cast<float>(numerators[i] / heads[i / shape.head_dim].denominator);
    }
  }
  int64_t drawn = 0;
  for (int h = 0; h < s.strata; ++h) drawn += s.drawn[h];
  UnitResult& result = *u.result;
  for (int g = threadIdx.x; g < shape.group; g += blockDim.x) {
    const HeadSums& head = heads[g];
    result.lse[g] = static_cast<float>(head.max + log(head.denominator));
    const auto tail_mass = static_cast<float>(1 - head.exact_denominator / head.denominator);
    if (drawn == s.tail_count) {
      result.promise[g] = Promise::kExact;
      result.relative_error[g] = 0;
      result.tail_mass[g] = tail_mass;
    } else if (drawn == 0) {
      result.promise[g] = Promise::kNone;
      result.relative_error[g] = INFINITY;
      result.tail_mass[g] = NAN;
    } else {
      double error = 0;
      if (head.variance != 0) {
        error = head.norm_sq_unbiased > 0 ? u.z * sqrt(head.variance / head.norm_sq_unbiased)
                                          : HUGE_VAL;
      }
      const bool bounded = u.tail == Tail::kStratified || u.bound != Bound::kDenominator;
      result.relative_error[g] = static_cast<float>(error);
      result.tail_mass[g] = tail_mass;
      result.promise[g] =
          bounded && !s.limited && error <= u.epsilon ? Promise::kStatistical : Promise::kNone;
    }
  }
  if (threadIdx.x == 0) {
    result.error_token = s.error_token;
    result.heavy_count = static_cast<int64_t>(s.heavy_count);
    result.sampled_count = drawn;
    result.touched_count = u.n - s.tail_count + drawn;
  }
}

}  // namespace spillway::cuda
