#pragma once

#include "gpu/kernels/estimate_head.cuh"
#include "gpu/kernels/step.cuh"
#include "host/core/page_index.h"
#include "host/core/rank_error.h"
#include "host/core/sample_limit.h"
#include "host/core/tail_draw.h"
#include "host/core/tail_plan.h"

// Evaluates a unit's sums: budgets after the pilot, output and certificate after the second draw,
// budgets of a third for heads that want it. Of a coded unit: budgets before the first draw, output
// and certificate after it, budgets of a second. One block per query head.
namespace spillway::cuda {

static_assert(kEstimatedStrataMax <= 32);  // one lane per stratum

// Rows drawn from all strata. All lanes of a warp call it.
__device__ inline int64_t DrawnRows(const UnitState& s) {
  const int64_t own = s.drawn[threadIdx.x % 32];
  return WarpSum(static_cast<int>(threadIdx.x % 32) < s.strata ? own : int64_t{0});
}

// Like StrataInTurn, with one lane per stratum. All lanes of a warp call the functions.
struct StrataByLane {
  int count;

  __device__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
  template <typename F>
  __device__ void ForEach(F f) const {
    if (lane() < count) f(lane());
  }
  template <typename F>
  __device__ NeymanSums Sum(F f) const {
    NeymanSums sums;
    if (lane() < count) sums = f(lane());
      // Side by side, because each step waits for the one before.
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      sums.spent += __shfl_xor_sync(kFullWarp, sums.spent, apart);
      sums.weight += __shfl_xor_sync(kFullWarp, sums.weight, apart);
      sums.residue += __shfl_xor_sync(kFullWarp, sums.residue, apart);
    }
    return sums;
  }
  template <typename F>
  __device__ bool Any(F f) const {
    return __any_sync(kFullWarp, lane() < count && f(lane()));
  }
};

// Sets budgets [strata] to the rows that one head's bound asks for, at least those drawn. The first
// warp works; the caller synchronises.
__device__ inline void SetHeadBudgets(const UnitRequest& u, const HeadSums& head, int strata,
                                      int64_t* budgets) {
  __shared__ NeymanStratum asked[kEstimatedStrataMax];
  __shared__ int64_t allotted[kEstimatedStrataMax];
  if (threadIdx.x >= 32) return;
  const StrataByLane walk{strata};
  walk.ForEach([&](int h) {
    const RowSet& set = head.sets[1 + h];
    const int64_t floor = u.coded() && set.drawn == 0
                              ? FirstDrawRows(u.terms.pilot_count, set.token_count)
                              : set.drawn;
    asked[h] = BudgetStratum(u.terms, set.token_count, floor, head.spreads[h]);
  });
  __syncwarp();
  HeadBudgets(walk, u.terms, head, head.spreads[0], asked, allotted);
  walk.ForEach([&](int h) { budgets[h] = allotted[h]; });
  if (!head.from_codes) return;
  __syncwarp();
  ClearBudgets(walk, u.terms, head, head.spreads, asked, allotted);
  walk.ForEach([&](int h) { budgets[h] = max(budgets[h], allotted[h]); });
}

// Lane h sets budget and threshold of stratum h in UnitState. The budget is the largest of the
// heads' budgets, within what row_count_max leaves. Returns whether the threshold has risen. One
// warp.
__device__ inline bool SettleBudget(const UnitRequest& u, int group, bool sampled) {
  UnitState& s = *u.state;
  const int h = threadIdx.x;
  const bool present = h < s.strata;
  const int64_t drawn = present ? s.drawn[h] : 0;
  const int64_t token_count = present ? s.stratum_count[h] : 0;
  const uint64_t drawn_threshold = present ? s.threshold[h] : 0;
  if (present) s.drawn_threshold[h] = drawn_threshold;
  if (!sampled) return false;
  // Past the L1 cache, because other blocks wrote them; and all at once.
  int64_t asked[kGroupMax];
#pragma unroll
  for (int g = 0; g < kGroupMax; ++g) {
    asked[g] = present && g < group ? __ldcg(&s.head_budget[g][h]) : 0;
  }
  int64_t budget = 0;
#pragma unroll
  for (int g = 0; g < kGroupMax; ++g) {
    budget = max(budget, asked[g]);
  }
  const int64_t total = WarpSum(budget);
  if (total > s.rows_left) {
    budget = RowShare::Of(s.rows_left, WarpSum(drawn), total).Cut(drawn, budget);
    if (h == 0) s.limited = 1;
  }
  if (!present) return false;
  const uint64_t threshold = BudgetThreshold(budget, token_count, drawn_threshold);
  s.budget[h] = budget;
  s.threshold[h] = threshold;
  return threshold != drawn_threshold;
}

// Sets the unit's budgets, and the limits of classes by which the filter draws them. first: whether
// it is the first draw of a coded unit. The first warp works.
__device__ inline void SettleBudgets(const AttendShape& shape, const UnitRequest& u, bool sampled,
                                     bool first) {
  if (threadIdx.x >= 32) return;
  UnitState& s = *u.state;
  const int h = threadIdx.x;
  const bool draws = SettleBudget(u, shape.group, sampled);
  for (int c = h; c < kClassCount; c += 32) s.limit_of_class[c] = 0;
  __syncwarp();
  uint64_t threshold = draws ? s.threshold[h] : 0;
  if (draws && first) threshold = CollectedThreshold(s.budget[h], threshold);
  const uint16_t limit = draws ? HashLimit(u.order, threshold) : uint16_t{0};
  if (limit > 0) s.limit_of_class[h] = limit;
  if (limit > 0 && h == s.tie_class) s.limit_of_class[kClassTie] = limit;
  const int nearest = __reduce_min_sync(kFullWarp, limit > 0 ? int{s.lowest_bin[h]} : INT16_MAX);
  const bool drawing = __any_sync(kFullWarp, draws);
  if (h == 0) {
    s.drawing = drawing;
    s.near_bin = nearest;
  }
}

// Computes the budgets of phase 1; of coded units, from what codes predict. Grid (heads, units);
// the last block of a unit settles them. Shared memory: HeadSumsBytes().
__global__ void __launch_bounds__(kEstimateThreads, kEstimateBlocksPerSm)
    BudgetKernel(AttendShape shape, const UnitRequest* units) {
  extern __shared__ __align__(16) float totals[];
  __shared__ HeadSums head;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  NoteMoment(u.result, kSampleBegins);
  UnitState& s = *u.state;
  if (threadIdx.x == 0 && u.coded()) u.terms.inflation = PredictedInflation(u.terms.inflation);
  TotalCodes(shape, u, blockIdx.x);
  EstimateHead(shape, u, blockIdx.x, 1, totals, head);
  // If not, there is nothing to draw, or the attend fails anyway.
  const bool draws = u.coded() ? s.strata > 0 && s.rows_left > 0 : DrawnRows(s) > 0;
  const bool sampled = s.error_token == kNoToken && draws;
  if (!sampled) {
    if (blockIdx.x == 0) SettleBudgets(shape, u, /*sampled=*/false, u.coded());
    return;
  }
  SetHeadBudgets(u, head, s.strata, s.head_budget[blockIdx.x]);
  if (IsLastBlock(shape.group, s.heads_done)) SettleBudgets(shape, u, true, u.coded());
}

// What is known of a unit and a head before its sums are.
struct HeadFacts {
  bool limited;     // whether row_count_max has cut a draw
  bool ranks_hold;  // whether the ranks are good enough for a promise
  bool step_holds;  // StepHolds(); false for a job
  uint32_t error_token;
  float value_unit;
  int64_t drawn;
  int64_t tail_count;
  int64_t heavy_count;
  int64_t moved_count;
};

// Fills `facts`, in shared memory, while other warps load the splits' sums: each load takes as long
// as the memory's latency. One warp; the caller must pass a barrier before it reads them.
__device__ inline void LoadFacts(const UnitRequest& u, const CallerTensors& step, int g,
                                 HeadFacts& facts) {
  const UnitState& s = *u.state;
  const int64_t drawn = DrawnRows(s);
  if (threadIdx.x % 32 != 0) return;
  const double rank_variance = s.rank_variance[g];
  const bool strays_fit = s.heavy_set.strays_fit;
  facts.limited = s.limited != 0;
  facts.error_token = s.error_token;
  facts.value_unit = ValueUnit(u);
  facts.drawn = drawn;
  facts.tail_count = s.tail_count;
  facts.heavy_count = static_cast<int64_t>(s.heavy_count);
  facts.moved_count = s.moved_count - static_cast<int64_t>(s.shared_count);
  facts.step_holds = step.check.header != nullptr && StepHolds(step.check, u.place.item);
  const bool can_be_sampled =
      u.statistics == nullptr || ValuesCanBeSampled(u.statistics->value_floor);
  facts.ranks_hold = strays_fit && RanksHold(rank_variance) && can_be_sampled;
}
// The warp that calls it. It has no split's sums to load.
__device__ inline bool LoadsFacts() { return threadIdx.x / 32 == kEstimateThreads / 32 - 1; }
static_assert(kAllSplitsMax <= kEstimateThreads - 32);

// Writes a head's output and certificate and, for head 0, the unit's counts. Returns the
// certificate in thread 0 only. All threads call it.
__device__ inline HeadCertificate WriteHead(const AttendShape& shape, const UnitRequest& u,
                                            const CallerTensors& step, int g, const HeadSums& head,
                                            const HeadFacts& facts) {
  const int d = shape.head_dim;
  const auto value = [&](int i) { return static_cast<float>(head.outputs[i] * facts.value_unit); };
  const float lse = threadIdx.x == 0 ? static_cast<float>(head.max + log(head.denominator)) : 0.0f;
  if (u.out != nullptr && threadIdx.x < d) u.out[g * d + threadIdx.x] = value(threadIdx.x);
  if (step.check.header != nullptr) {
    WriteToTensors(step, u.place, shape.group, d, g,
                   facts.step_holds && facts.error_token == kNoToken, value, lse, u.result->report);
  }
  if (threadIdx.x != 0) return {};
  UnitResult& result = *u.result;
  const HeadCertificate certificate =
      Certify(u.terms, facts.limited, facts.ranks_hold, facts.drawn, facts.tail_count, head);
  result.lse[g] = lse;
  result.certificates[g] = certificate;
  if (g == 0) {
    result.error_token = facts.error_token;
    result.heavy_count = facts.heavy_count;
    result.sampled_count = facts.drawn;
    result.touched_count = u.n - facts.tail_count + facts.drawn;
    result.moved_count = facts.moved_count;
    result.moments[kUnitEnds] = GlobalTime();
  }
  return certificate;
}

// Writes output and certificate. Grid (heads, units). With draws_again, heads whose error is too
// large set budgets of phase 2, and the unit's last block settles them.
// Shared memory: HeadSumsBytes().
__global__ void __launch_bounds__(kEstimateThreads, kEstimateBlocksPerSm)
    FinishKernel(AttendShape shape, bool draws_again, CallerTensors step,
                 const UnitRequest* units) {
  extern __shared__ __align__(16) float totals[];
  __shared__ HeadSums head;
  __shared__ HeadFacts facts;
  __shared__ UnitRequest u;
  __shared__ bool wants;
  Begin(units + blockIdx.y, u);
  UnitState& s = *u.state;
  const int g = blockIdx.x;
  if (LoadsFacts()) LoadFacts(u, step, g, facts);
  EstimateHead(shape, u, g, u.terms.tail == Tail::kNone ? 1 : 2, totals, head);
  const HeadCertificate certificate = WriteHead(shape, u, step, g, head, facts);
  if (!draws_again) return;
  if (threadIdx.x == 0) {
    wants = facts.error_token == kNoToken &&
            (u.coded() ? s.strata > 0 && WantsSecondDraw(u.terms, facts.limited, certificate)
                       : WantsMoreRows(u.terms, facts.limited, certificate));
    if (wants) atomicAdd(&s.heads_wanting, 1);
    if (!u.coded()) u.terms.inflation *= kMoreInflation;
  }
  __syncthreads();
  if (wants) {
    SetHeadBudgets(u, head, s.strata, s.head_budget[g]);
  } else if (threadIdx.x < s.strata) {
    s.head_budget[g][threadIdx.x] = 0;
  }
  if (!IsLastBlock(shape.group, s.heads_finished)) return;
  SettleBudgets(shape, u, *static_cast<volatile uint32_t*>(&s.heads_wanting) > 0,
                /*first=*/false);
}

// The same after the third draw, for units that had one.
__global__ void __launch_bounds__(kEstimateThreads, kEstimateBlocksPerSm)
    FinishAgainKernel(AttendShape shape, CallerTensors step, const UnitRequest* units) {
  extern __shared__ __align__(16) float totals[];
  __shared__ HeadSums head;
  __shared__ HeadFacts facts;
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  if (!u.state->drawing) return;
  if (LoadsFacts()) LoadFacts(u, step, blockIdx.x, facts);
  EstimateHead(shape, u, blockIdx.x, kPhases, totals, head);
  WriteHead(shape, u, step, blockIdx.x, head, facts);
}

}  // namespace spillway::cuda
