#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/budget.h"
#include "host/core/neyman.h"

// What a unit's sums say of one query head: budgets after the pilot, output
// and certificate at the end. fp64, every sum in one order; the formulas are
// host/core/estimate.h's and host/core/budget.h's. A block takes one head.
namespace spillway::cuda {

inline constexpr int kEstimateThreads = 512;
inline constexpr int kAllSegmentsMax = 2 * kSegmentMax;

// Per stratum.
struct StratumSums {
  double trace_o;
  double trace_n;
  double variance_x;
};

// Sums over a stratum's rows: of x, x^2 and x^2 ||v||^2.
struct StratumScalars {
  double sx;
  double sxx;
  double sxxvv;
};
// Over 32 dimensions: of squares of sum x v and of sum x (v - o), and o . sum
// x^2 v.
struct StratumMoments {
  double mean_n_sq;
  double mean_o_sq;
  double cross;
};

// What is known of the head, in shared memory.
struct HeadSums {
  double max;
  double denominator;
  double exact_denominator;
  double norm_sq;
  double norm_sq_unbiased;
  double variance;
  StratumSums strata[kTailStrataMax];
  double outputs[kHeadDimMax];     // o^
  double numerators[kHeadDimMax];  // N^
};

// n_h / r_h of a set; 1 for the exact rows.
__device__ inline double SetRate(const UnitState& s, int set) {
  return set == 0 ? 1.0
                  : static_cast<double>(s.stratum_count[set - 1]) /
                        static_cast<double>(s.drawn[set - 1]);
}

// Rows drawn of all strata. All lanes of a warp.
__device__ inline int64_t DrawnRows(const UnitState& s) {
  int64_t drawn = 0;
  for (int h = threadIdx.x % 32; h < s.strata; h += 32) drawn += s.drawn[h];
  return WarpSum(drawn);
}

// Where a set's segments lie in each phase.
struct SetSegments {
  int16_t begin[2];
  int16_t end[2];
};

// The sum over the block's threads, the same in every thread; the order is
// that of the warps.
__device__ inline double BlockSum(double x) {
  __shared__ double warps[kEstimateThreads / 32];
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (const double part : warps) sum += part;
  return sum;
}

// Fills `head` from the segments of phases [0, phases). All threads.
__device__ inline void EstimateHead(const AttendShape& shape, const UnitRequest& u, int g,
                                    int phases, HeadSums& head) {
  __shared__ SetSegments sets[1 + kTailStrataMax];
  __shared__ double rates[1 + kTailStrataMax];
  __shared__ int16_t set_of[kAllSegmentsMax];
  __shared__ float4 sums[kAllSegmentsMax];     // max, sum, sum_sq, sum_sq_norm
  __shared__ double factors[kAllSegmentsMax];  // exp(max - M)
  __shared__ double slices[kEstimateThreads];
  __shared__ StratumScalars scalars[kTailStrataMax];
  __shared__ StratumMoments moments[kTailStrataMax][kHeadDimMax / 32];
  const UnitState& s = *u.state;
  const int group = shape.group;
  const int d = shape.head_dim;
  const int strata = s.strata;
  const int first_count = s.segment_count[0];
  const int segments = first_count + (phases > 1 ? s.segment_count[1] : 0);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t partial_floats = PartialFloats(group, d);
  const auto partial = [&](int i) {
    return u.partials + (i < first_count ? i : kSegmentMax + (i - first_count)) * partial_floats;
  };

  for (int i = threadIdx.x; i <= strata; i += blockDim.x) {
    sets[i] = {};
    rates[i] = SetRate(s, i);
  }
  __syncthreads();
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < segments; i += blockDim.x) {
    const int phase = i < first_count ? 0 : 1;
    const Segment* all = s.segments[phase];
    const int at = phase == 0 ? i : i - first_count;
    const int set = all[at].set;
    set_of[i] = static_cast<int16_t>(set);
    // Segments of a set adjoin.
    if (at == 0 || all[at - 1].set != set) sets[set].begin[phase] = static_cast<int16_t>(i);
    if (at + 1 == s.segment_count[phase] || all[at + 1].set != set) {
      sets[set].end[phase] = static_cast<int16_t>(i + 1);
    }
    sums[i] = reinterpret_cast<const float4*>(partial(i))[g];
    largest = fmaxf(largest, sums[i].x);
  }
  largest = WarpMax(largest);
  if (lane == 0) slices[warp] = largest;
  __syncthreads();
  double max = slices[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) max = fmax(max, slices[w]);
  double exact = 0, all = 0;
  for (int i = threadIdx.x; i < segments; i += blockDim.x) {
    factors[i] = exp(static_cast<double>(sums[i].x) - max);
    const double part = rates[set_of[i]] * factors[i] * sums[i].y;
    all += part;
    if (set_of[i] == 0) exact += part;
  }
  all = BlockSum(all);
  exact = BlockSum(exact);

  // Numerators: segments dealt out to as many slices as there are threads for,
  // a thread per dimension in each.
  const int slice_count = blockDim.x / d;
  const int slice = threadIdx.x / d;
  const int i = threadIdx.x % d;
  double numerator = 0;
  if (slice < slice_count) {
#pragma unroll 8
    for (int j = slice; j < segments; j += slice_count) {
      numerator += rates[set_of[j]] * factors[j] * partial(j)[4 * group + g * d + i];
    }
  }
  slices[threadIdx.x] = numerator;
  __syncthreads();
  double norm_sq = 0;
  if (threadIdx.x < d) {
    for (int k = 1; k < slice_count; ++k) numerator += slices[k * d + i];
    head.numerators[i] = numerator;
    head.outputs[i] = numerator / all;
    norm_sq = numerator * numerator;
  }
  norm_sq = BlockSum(norm_sq);

  // Per stratum, a warp for the sums that have no dimension, then one for each
  // 32 dimensions.
  const double o_norm_sq = norm_sq / (all * all);
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int h = warp; h < strata; h += warps) {
    const SetSegments set = sets[1 + h];
    double sx = 0, sxx = 0, sxxvv = 0;
    for (int p = 0; p < phases; ++p) {
      for (int j = set.begin[p] + lane; j < set.end[p]; j += 32) {
        const double f = factors[j];
        sx += f * sums[j].y;
        sxx += f * f * sums[j].z;
        sxxvv += f * f * sums[j].w;
      }
    }
    sx = WarpSum(sx);
    sxx = WarpSum(sxx);
    sxxvv = WarpSum(sxxvv);
    if (lane == 0) scalars[h] = {sx, sxx, sxxvv};
  }
  __syncthreads();
  const int parts = (d + 31) / 32;
  for (int task = warp; task < strata * parts; task += warps) {
    const int h = task / parts;
    const int dim = task % parts * 32 + lane;
    const SetSegments set = sets[1 + h];
    double sxv = 0, sxxv = 0;
    for (int p = 0; p < phases && dim < d; ++p) {
#pragma unroll 8
      for (int j = set.begin[p]; j < set.end[p]; ++j) {
        const float* value = partial(j) + 4 * group + g * d + dim;
        const double f = factors[j];
        sxv += f * value[0];
        sxxv += f * f * value[group * d];
      }
    }
    const double o = dim < d ? head.outputs[dim] : 0;
    const double difference = dim < d ? sxv - o * scalars[h].sx : 0;
    const double mean_n_sq = WarpSum(sxv * sxv);
    const double mean_o_sq = WarpSum(difference * difference);
    const double cross = WarpSum(o * sxxv);
    if (lane == 0) moments[h][task % parts] = {mean_n_sq, mean_o_sq, cross};
  }
  __syncthreads();
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    StratumSums& out = head.strata[h];
    const double r = static_cast<double>(s.drawn[h]);
    if (s.drawn[h] < 2) {
      const double unknown = s.drawn[h] == s.stratum_count[h] || s.drawn[h] == 0 ? 0.0 : HUGE_VAL;
      out = {unknown, unknown, unknown};
      continue;
    }
    const StratumScalars& sum = scalars[h];
    StratumMoments moment = moments[h][0];
    for (int part = 1; part < parts; ++part) {
      moment.mean_n_sq += moments[h][part].mean_n_sq;
      moment.mean_o_sq += moments[h][part].mean_o_sq;
      moment.cross += moments[h][part].cross;
    }
    // Rounding may leave a little below 0; sums that passed fp32's range are
    // known to say nothing.
    const auto settled = [](double v) { return isfinite(v) ? fmax(0.0, v) : HUGE_VAL; };
    out.trace_n = settled((sum.sxxvv - moment.mean_n_sq / r) / (r - 1));
    out.trace_o = settled(
        (sum.sxxvv - 2 * moment.cross + o_norm_sq * sum.sxx - moment.mean_o_sq / r) / (r - 1));
    out.variance_x = settled((sum.sxx - sum.sx * sum.sx / r) / (r - 1));
  }
  __syncthreads();
  if (warp == 0) {
    double variance = 0, norm_variance = 0;
    for (int h = lane; h < strata; h += 32) {
      if (s.drawn[h] == 0 || s.drawn[h] >= s.stratum_count[h]) continue;
      const double n = static_cast<double>(s.stratum_count[h]);
      const double spread = n * n * (1 / static_cast<double>(s.drawn[h]) - 1 / n);
      variance += spread * head.strata[h].trace_o;
      norm_variance += spread * head.strata[h].trace_n;
    }
    variance = WarpSum(variance);
    norm_variance = WarpSum(norm_variance);
    if (lane == 0) {
      head.max = max;
      head.denominator = all;
      head.exact_denominator = exact;
      head.norm_sq = norm_sq;
      head.variance = variance;
      head.norm_sq_unbiased = fmax(0.0, norm_sq - norm_variance);
    }
  }
  __syncthreads();
}

// Estimated relative error at confidence 1 - delta.
__device__ inline double RelativeErrorOf(const UnitRequest& u, const HeadSums& head) {
  if (head.variance == 0) return 0;
  return head.norm_sq_unbiased > 0 ? u.z * sqrt(head.variance / head.norm_sq_unbiased) : HUGE_VAL;
}

// Rows per stratum that one head's bound asks for, least(h) at least, into
// budgets. All threads; the caller synchronises.
template <typename Least>
__device__ inline void HeadBudgets(const UnitRequest& u, const HeadSums& head, Least least,
                                   int64_t* budgets) {
  __shared__ NeymanStratum neyman[kTailStrataMax];
  __shared__ int64_t allotted[kTailStrataMax];
  const UnitState& s = *u.state;
  const int strata = s.strata;
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    neyman[h].token_count = s.stratum_count[h];
    neyman[h].floor = least(h);
    neyman[h].deviation = u.inflation * sqrt(head.strata[h].trace_o);
    allotted[h] = s.stratum_count[h];
  }
  __syncthreads();
  // Else nothing can be said of the error without reading every row.
  if (threadIdx.x == 0 && head.norm_sq_unbiased > 0 && isfinite(head.variance)) {
    if (u.tail == Tail::kUniform) {
      const StratumSums& all = head.strata[0];
      const UniformTail tail{static_cast<double>(neyman[0].token_count),
                             u.inflation * sqrt(all.variance_x),
                             u.inflation * u.inflation * all.trace_n,
                             u.inflation * u.inflation * all.trace_o,
                             sqrt(head.norm_sq_unbiased),
                             head.denominator};
      allotted[0] = FinitePopulation(UniformBudget(u.bound, tail, u.epsilon, u.bound_z),
                                     neyman[0].token_count, neyman[0].floor);
    } else {
      NeymanAllot(std::span<const NeymanStratum>(neyman, strata),
                  u.epsilon * u.epsilon * head.norm_sq_unbiased / (u.z * u.z),
                  std::span<int64_t>(allotted, strata));
    }
  }
  __syncthreads();
  for (int h = threadIdx.x; h < strata; h += blockDim.x) budgets[h] = allotted[h];
}

// The unit's budgets from its heads': the most per stratum, within what
// row_count_max leaves; and the thresholds and limits that draw them. All
// threads.
__device__ inline void SettleBudgets(const AttendShape& shape, const UnitRequest& u, bool sampled) {
  __shared__ uint16_t limits[kClassCount];
  __shared__ int near_bin;
  UnitState& s = *u.state;
  const int group = shape.group;
  const int strata = s.strata;
  if (sampled) {
    for (int h = threadIdx.x; h < strata; h += blockDim.x) {
      int64_t most = 0;
      for (int g = 0; g < group; ++g) {
        // Another block's, past this block's cache.
        most = max(most, *static_cast<const volatile int64_t*>(&s.head_budget[g][h]));
      }
      s.budget[h] = most;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int64_t total = 0;
      for (int h = threadIdx.x; h < strata; h += 32) total += s.budget[h];
      total = WarpSum(total);
      if (total > s.rows_left) {
        // What the pilot drew is spent; the rest is shared in proportion.
        const int64_t drawn = DrawnRows(s);
        if (threadIdx.x == 0) s.limited = 1;
        const double share = static_cast<double>(s.rows_left - drawn) /
                             static_cast<double>(max(int64_t{1}, total - drawn));
        for (int h = threadIdx.x; h < strata; h += 32) {
          const int64_t have = s.drawn[h];
          s.budget[h] =
              have + static_cast<int64_t>(share * static_cast<double>(s.budget[h] - have));
        }
      }
    }
    __syncthreads();
  }
  bool drawing = false;
  for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) limits[c] = 0;
  __syncthreads();
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    const unsigned long long drawn_threshold = s.threshold[h];
    s.drawn_threshold[h] = drawn_threshold;
    if (!sampled) continue;
    const unsigned long long threshold = SampleThreshold(s.budget[h], s.stratum_count[h]);
    s.threshold[h] = max(drawn_threshold, threshold);
    if (threshold <= drawn_threshold) continue;
    drawing = true;
    limits[h] = SampleLimit(u.order, threshold);
    if (h == s.tie_class) limits[kClassTie] = limits[h];
  }
  if (threadIdx.x == 0) near_bin = INT16_MAX;
  drawing = __syncthreads_or(drawing);
  int nearest = INT16_MAX;
  for (int b = threadIdx.x; drawing && b < shape.bin_count + 2; b += blockDim.x) {
    const uint16_t limit = limits[u.class_of_bin[b]];
    u.limit_of_bin[b] = limit;
    if (limit > 0 && b < shape.bin_count) nearest = min(nearest, b);
  }
  atomicMin(&near_bin, nearest);
  __syncthreads();
  if (threadIdx.x == 0) {
    s.drawing = drawing;
    s.near_bin = near_bin;
  }
}

// Budgets of phase 1. Grid (heads, units); the unit's last block settles them.
__global__ void __launch_bounds__(kEstimateThreads)
    BudgetKernel(AttendShape shape, const UnitRequest* units) {
  __shared__ HeadSums head;
  __shared__ UnitRequest u;
  __shared__ bool last;
  Begin(units + blockIdx.y, u);
  UnitState& s = *u.state;
  // Else there is nothing to draw, or nothing that would be answered.
  const bool sampled = s.error_token == kNoToken && DrawnRows(s) > 0;
  if (!sampled) {
    if (blockIdx.x == 0) SettleBudgets(shape, u, false);
    return;
  }
  EstimateHead(shape, u, blockIdx.x, 1, head);
  HeadBudgets(
      u, head, [&](int h) { return s.drawn[h]; }, s.head_budget[blockIdx.x]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&s.heads_done, 1) + 1 == static_cast<uint32_t>(shape.group);
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  SettleBudgets(shape, u, true);
}

// Output and certificate. Grid (heads, units).
__global__ void __launch_bounds__(kEstimateThreads)
    FinishKernel(AttendShape shape, const UnitRequest* units) {
  __shared__ HeadSums head;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const UnitState& s = *u.state;
  const int g = blockIdx.x;
  const int d = shape.head_dim;
  EstimateHead(shape, u, g, u.tail == Tail::kNone ? 1 : 2, head);
  if (u.out != nullptr && threadIdx.x < d) {
    u.out[g * d + threadIdx.x] = static_cast<float>(head.outputs[threadIdx.x]);
  }
  if (threadIdx.x >= 32) return;
  const int64_t drawn = DrawnRows(s);
  if (threadIdx.x != 0) return;
  UnitResult& result = *u.result;
  result.lse[g] = static_cast<float>(head.max + log(head.denominator));
  const auto tail_mass = static_cast<float>(1 - head.exact_denominator / head.denominator);
  if (u.tail == Tail::kLshSampling) {
    result.promise[g] = Promise::kNone;
    result.relative_error[g] = INFINITY;
    result.tail_mass[g] = tail_mass;
  } else if (drawn == s.tail_count) {
    result.promise[g] = Promise::kExact;
    result.relative_error[g] = 0;
    result.tail_mass[g] = tail_mass;
  } else if (drawn == 0) {
    result.promise[g] = Promise::kNone;
    result.relative_error[g] = INFINITY;
    result.tail_mass[g] = NAN;
  } else {
    const double error = RelativeErrorOf(u, head);
    result.relative_error[g] = static_cast<float>(error);
    result.tail_mass[g] = tail_mass;
    result.promise[g] =
        u.may_promise && !s.limited && error <= u.epsilon ? Promise::kStatistical : Promise::kNone;
  }
  if (g != 0) return;
  result.error_token = s.error_token;
  result.heavy_count = static_cast<int64_t>(s.heavy_count);
  result.sampled_count = drawn;
  result.touched_count = u.n - s.tail_count + drawn;
  result.moved_count = s.moved_count;
}

}  // namespace spillway::cuda
