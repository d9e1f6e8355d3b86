#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/estimate.h"
#include "host/core/sample_limit.h"
#include "host/core/tail_draw.h"
#include "host/core/tail_plan.h"

// What a unit's sums say of one query head: budgets after the pilot, output
// and certificate at the end. Summed up in fp64 here, every sum in one order;
// the formulas are host/core/estimate.h's. A block takes one head.
namespace spillway::cuda {

inline constexpr int kEstimateThreads = 512;
inline constexpr int kAllSplitsMax = 2 * kSplitMax;

// The dimensions' part of StratumMoments, over 32 of them.
struct DimensionMoments {
  double sum_xv_sq;
  double sum_xvo_sq;
  double o_dot_sum_xxv;
};

// What is known of the head, in shared memory.
struct HeadSums : HeadTotals {
  StratumSpread spreads[kTailStrataMax];
  double outputs[kHeadDimMax];  // o^
};

// n_h / r_h of a set; 1 for the exact rows.
__device__ inline double SetRate(const UnitState& s, int set) {
  return set == 0 ? 1.0 : StratumRate(s.drawn[set - 1], s.stratum_count[set - 1]);
}

// Rows drawn of all strata. All lanes of a warp.
__device__ inline int64_t DrawnRows(const UnitState& s) {
  int64_t drawn = 0;
  for (int h = threadIdx.x % 32; h < s.strata; h += 32) drawn += s.drawn[h];
  return WarpSum(drawn);
}

// Where a set's splits lie in each phase.
struct SetSplits {
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

// Fills `head` from the splits of phases [0, phases). All threads.
__device__ inline void EstimateHead(const AttendShape& shape, const UnitRequest& u, int g,
                                    int phases, HeadSums& head) {
  __shared__ SetSplits sets[1 + kTailStrataMax];
  __shared__ double rates[1 + kTailStrataMax];
  __shared__ int16_t set_of[kAllSplitsMax];
  __shared__ SoftmaxSums sums[kAllSplitsMax];
  __shared__ double factors[kAllSplitsMax];  // exp(max - M)
  __shared__ double slices[kEstimateThreads];
  __shared__ StratumMoments moments[kTailStrataMax];
  __shared__ DimensionMoments of_dimensions[kTailStrataMax][kHeadDimMax / 32];
  const UnitState& s = *u.state;
  const int group = shape.group;
  const int d = shape.head_dim;
  const int strata = s.strata;
  const int first_count = s.split_count[0];
  const int splits = first_count + (phases > 1 ? s.split_count[1] : 0);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t partial_floats = PartialFloats(group, d);
  const auto partial = [&](int i) {
    return u.partials + (i < first_count ? i : kSplitMax + (i - first_count)) * partial_floats;
  };

  for (int i = threadIdx.x; i <= strata; i += blockDim.x) {
    sets[i] = {};
    rates[i] = SetRate(s, i);
  }
  __syncthreads();
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < splits; i += blockDim.x) {
    const int phase = i < first_count ? 0 : 1;
    const KvSplit* all = s.splits[phase];
    const int at = phase == 0 ? i : i - first_count;
    const int set = all[at].set;
    set_of[i] = static_cast<int16_t>(set);
    // Splits of a set adjoin.
    if (at == 0 || all[at - 1].set != set) sets[set].begin[phase] = static_cast<int16_t>(i);
    if (at + 1 == s.split_count[phase] || all[at + 1].set != set) {
      sets[set].end[phase] = static_cast<int16_t>(i + 1);
    }
    sums[i] = reinterpret_cast<const SoftmaxSums*>(partial(i))[g];
    largest = fmaxf(largest, sums[i].max);
  }
  largest = WarpMax(largest);
  if (lane == 0) slices[warp] = largest;
  __syncthreads();
  double max = slices[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) max = fmax(max, slices[w]);
  double exact = 0, all = 0;
  for (int i = threadIdx.x; i < splits; i += blockDim.x) {
    factors[i] = exp(static_cast<double>(sums[i].max) - max);
    const double part = rates[set_of[i]] * factors[i] * sums[i].sum;
    all += part;
    if (set_of[i] == 0) exact += part;
  }
  all = BlockSum(all);
  exact = BlockSum(exact);

  // Numerators: splits dealt out to as many slices as there are threads for,
  // a thread per dimension in each.
  const int slice_count = blockDim.x / d;
  const int slice = threadIdx.x / d;
  const int i = threadIdx.x % d;
  double numerator = 0;
  if (slice < slice_count) {
#pragma unroll 8
    for (int j = slice; j < splits; j += slice_count) {
      numerator += rates[set_of[j]] * factors[j] * partial(j)[kSumsFloats * group + g * d + i];
    }
  }
  slices[threadIdx.x] = numerator;
  __syncthreads();
  double norm_sq = 0;
  if (threadIdx.x < d) {
    for (int k = 1; k < slice_count; ++k) numerator += slices[k * d + i];
    head.outputs[i] = numerator / all;
    norm_sq = numerator * numerator;
  }
  norm_sq = BlockSum(norm_sq);

  // Per stratum, a warp for the sums that have no dimension, then one for each
  // 32 dimensions.
  const double o_norm_sq = norm_sq / (all * all);
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int h = warp; h < strata; h += warps) {
    const SetSplits set = sets[1 + h];
    double sx = 0, sxx = 0, sxxvv = 0;
    for (int p = 0; p < phases; ++p) {
      for (int j = set.begin[p] + lane; j < set.end[p]; j += 32) {
        const double f = factors[j];
        sx += f * sums[j].sum;
        sxx += f * f * sums[j].sum_sq;
        sxxvv += f * f * sums[j].sum_sq_norm;
      }
    }
    sx = WarpSum(sx);
    sxx = WarpSum(sxx);
    sxxvv = WarpSum(sxxvv);
    if (lane == 0) moments[h] = {sx, sxx, sxxvv, 0, 0, 0};
  }
  __syncthreads();
  const int parts = (d + 31) / 32;
  for (int task = warp; task < strata * parts; task += warps) {
    const int h = task / parts;
    const int dim = task % parts * 32 + lane;
    const SetSplits set = sets[1 + h];
    double sxv = 0, sxxv = 0;
    for (int p = 0; p < phases && dim < d; ++p) {
#pragma unroll 8
      for (int j = set.begin[p]; j < set.end[p]; ++j) {
        const float* value = partial(j) + kSumsFloats * group + g * d + dim;
        const double f = factors[j];
        sxv += f * value[0];
        sxxv += f * f * value[group * d];
      }
    }
    const double o = dim < d ? head.outputs[dim] : 0;
    const double sxvo = dim < d ? sxv - o * moments[h].sum_x : 0;
    const double sum_xv_sq = WarpSum(sxv * sxv);
    const double sum_xvo_sq = WarpSum(sxvo * sxvo);
    const double o_dot_sum_xxv = WarpSum(o * sxxv);
    if (lane == 0) of_dimensions[h][task % parts] = {sum_xv_sq, sum_xvo_sq, o_dot_sum_xxv};
  }
  __syncthreads();
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    StratumMoments moment = moments[h];
    for (int part = 0; part < parts; ++part) {
      moment.sum_xv_sq += of_dimensions[h][part].sum_xv_sq;
      moment.sum_xvo_sq += of_dimensions[h][part].sum_xvo_sq;
      moment.o_dot_sum_xxv += of_dimensions[h][part].o_dot_sum_xxv;
    }
    head.spreads[h] = SpreadOf(s.drawn[h], s.stratum_count[h], moment, o_norm_sq);
  }
  __syncthreads();
  if (warp == 0) {
    SampleVariance variance{};
    for (int h = lane; h < strata; h += 32) {
      variance.Add(s.drawn[h], s.stratum_count[h], head.spreads[h]);
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
    }
  }
  __syncthreads();
}

// Rows per stratum that one head's bound asks for, what is drawn at least, into
// budgets. All threads; the caller synchronises.
__device__ inline void SetHeadBudgets(const UnitRequest& u, const HeadSums& head,
                                      int64_t* budgets) {
  __shared__ NeymanStratum asked[kTailStrataMax];
  __shared__ int64_t allotted[kTailStrataMax];
  const UnitState& s = *u.state;
  const int strata = s.strata;
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    asked[h] = BudgetStratum(u.terms, s.stratum_count[h], s.drawn[h], head.spreads[h]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    HeadBudgets(u.terms, head, head.spreads[0], std::span<const NeymanStratum>(asked, strata),
                std::span<int64_t>(allotted, strata));
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
        const RowShare share = RowShare::Of(s.rows_left, DrawnRows(s), total);
        if (threadIdx.x == 0) s.limited = 1;
        for (int h = threadIdx.x; h < strata; h += 32) {
          s.budget[h] = share.Cut(s.drawn[h], s.budget[h]);
        }
      }
    }
    __syncthreads();
  }
  bool drawing = false;
  for (int c = threadIdx.x; c < kClassCount; c += blockDim.x) limits[c] = 0;
  __syncthreads();
  for (int h = threadIdx.x; h < strata; h += blockDim.x) {
    const uint64_t drawn_threshold = s.threshold[h];
    s.drawn_threshold[h] = drawn_threshold;
    if (!sampled) continue;
    const uint64_t threshold = BudgetThreshold(s.budget[h], s.stratum_count[h], drawn_threshold);
    s.threshold[h] = threshold;
    if (threshold == drawn_threshold) continue;
    drawing = true;
    limits[h] = HashLimit(u.order, threshold);
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
  SetHeadBudgets(u, head, s.head_budget[blockIdx.x]);
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
  EstimateHead(shape, u, g, u.terms.tail == Tail::kNone ? 1 : 2, head);
  if (u.out != nullptr && threadIdx.x < d) {
    u.out[g * d + threadIdx.x] = static_cast<float>(head.outputs[threadIdx.x]);
  }
  if (threadIdx.x >= 32) return;
  const int64_t drawn = DrawnRows(s);
  if (threadIdx.x != 0) return;
  UnitResult& result = *u.result;
  result.lse[g] = static_cast<float>(head.max + log(head.denominator));
  result.certificates[g] = Certify(u.terms, s.limited != 0, drawn, s.tail_count, head);
  if (g != 0) return;
  result.error_token = s.error_token;
  result.heavy_count = static_cast<int64_t>(s.heavy_count);
  result.sampled_count = drawn;
  result.touched_count = u.n - s.tail_count + drawn;
  result.moved_count = s.moved_count;
}

}  // namespace spillway::cuda
