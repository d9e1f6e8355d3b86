#pragma once

#include "gpu/kernels/code_totals.cuh"
#include "gpu/kernels/head_sums.cuh"

// Adds up the sums of the folds' splits for one query head: vectors in fp32, all else in fp64,
// every sum in a fixed order. The formulas are in host/core/estimate.h and degrees.h. One block per
// head.
namespace spillway::cuda {

// Parts of the strata whose sums S' is made of.
inline constexpr int kSpreadSlices = 4;

// Shared memory of HeadEstimate that its caller does not need afterwards.
struct HeadScratch {
  int16_t set_of[kAllSplitsMax];  // of the split at a place; -1: no split
  SoftmaxSums sums[kAllSplitsMax];
  double factors[kAllSplitsMax];  // exp(split's max - set's max)
  float sink;                     // the head's sink logit; -infinity: it has none
  double sink_part;               // exp(sink - M)
  double exact_rows;              // the exact rows' part of D^
  // Of a coded unit.
  HeadCodes codes;
  double code_factor;                       // exp(codes' reference - M); 0 if they give nothing
  double centre_square;                     // the mean of ||c - o||^2 over the tail, weighted by x^
  double x_variances[kEstimatedStrataMax];  // what strata add to the variance of D^
  StratumProjection projections[kEstimatedStrataMax];
  double output_projection[kProjectionDims];
  double slices[kSpreadSlices][kProjectedPairs];
};

// Makes the HeadSums of query head g from its splits of phases [0, phases). All of the block's
// threads call Run(). Its parts follow in the order in which they run; a part that other threads
// read from ends with a barrier.
class HeadEstimate {
 public:
  // totals: HeadSumsBytes() of shared memory.
  __device__ HeadEstimate(const AttendShape& shape, const UnitRequest& u, int g, float* totals,
                          HeadScratch& scratch, HeadSums& head)
      : shape_(shape),
        u_(u),
        scratch_(scratch),
        head_(head),
        sets_(head.sets),
        totals_(totals),
        group_(shape.group),
        d_(shape.head_dim),
        g_(g),
        strata_(u.state->strata),
        partial_floats_(PartialFloats(shape.group, shape.head_dim)) {}

  __device__ void Run(int phases) {
    const OwnSplit own = LoadSplit(phases);
    LoadSets();
    __syncthreads();
    MarkSplits(own);
    ScaleToMax(own);
    AddVectors();
    double denominator = AddDenominators(own);
    if (IsCoded()) denominator = ClearDenominator(denominator);
    const double norm_sq = MakeOutput(denominator);
    if (IsCoded()) MeasureCentres();
    MeasureStrata(norm_sq / (denominator * denominator));
    const TwoSums covariance = AddCovariance();
    if (warp_ == 0) AddVariances(covariance);
    __syncthreads();
  }

 private:
  // The place that a thread loads, and the set of the split that is there; -1: none.
  struct OwnSplit {
    int place;
    int set;

    __device__ int phase() const { return place / kSplitMax; }
    __device__ int at() const { return place % kSplitMax; }
  };

  // Everything but the splits' vectors is loaded at once; what is loaded for places without a split
  // is ignored.
  __device__ OwnSplit LoadSplit(int phases) {
    const UnitState& s = *u_.state;
    OwnSplit own = {static_cast<int>(threadIdx.x), -1};
    if (own.place >= phases * kSplitMax) return own;
    const int set = s.splits[own.phase()][own.at()].set;
    scratch_.sums[own.place] = *reinterpret_cast<const SoftmaxSums*>(
        u_.partials + own.place * partial_floats_ + g_ * kSumsFloats);
    if (own.at() < s.split_count[own.phase()]) own.set = set;
    scratch_.set_of[own.place] = static_cast<int16_t>(own.set);
    return own;
  }

  __device__ void LoadSets() {
    if (threadIdx.x == kSetsMax) scratch_.codes = CodesOf(shape_, u_, g_);
    if (threadIdx.x == kSetsMax + 1) scratch_.sink = u_.sinks != nullptr ? u_.sinks[g_] : -INFINITY;
    if (threadIdx.x >= kSetsMax) return;
    const UnitState& s = *u_.state;
    RowSet set{};
    if (threadIdx.x > 0) {
      const int h = static_cast<int>(threadIdx.x) - 1;
      set.drawn = s.drawn[h];
      set.token_count = s.stratum_count[h];
    }
    set.rate = threadIdx.x == 0 ? 1.0
               : set.drawn > 0  ? StratumRate(set.drawn, set.token_count)
                                : 0.0;
    sets_[threadIdx.x] = set;
  }

  // Tells each set where its splits are. The splits of a set are adjacent.
  __device__ void MarkSplits(const OwnSplit& own) {
    if (own.set >= 0) {
      const int at = own.at();
      if (at == 0 || scratch_.set_of[own.place - 1] != own.set) {
        sets_[own.set].splits.begin[own.phase()] = static_cast<int16_t>(own.place);
      }
      if (at + 1 == kSplitMax || scratch_.set_of[own.place + 1] != own.set) {
        sets_[own.set].splits.end[own.phase()] = static_cast<int16_t>(own.place + 1);
      }
    }
    __syncthreads();
  }

  // Sets M, the largest logit of all rows, and the factors of sets and splits.
  __device__ void ScaleToMax(const OwnSplit& own) {
    for (int i = warp_; i <= strata_; i += kWarps) {
      float max = -INFINITY;
      ForSplits(sets_[i].splits, lane_, [&](int j) { max = fmaxf(max, scratch_.sums[j].max); });
      max = WarpMax(max);
      if (lane_ == 0) sets_[i].max = max;
    }
    __syncthreads();
    double max = sets_[0].max;
    for (int i = 1; i <= strata_; ++i) max = fmax(max, static_cast<double>(sets_[i].max));
    max = fmax(max, static_cast<double>(scratch_.sink));
    const HeadCodes& codes = scratch_.codes;
    if (codes.sum > 0) max = fmax(max, codes.reference);
    if (threadIdx.x <= strata_) {
      sets_[threadIdx.x].factor = exp(static_cast<double>(sets_[threadIdx.x].max) - max);
    }
    if (own.set >= 0) {
      scratch_.factors[own.place] =
          exp(static_cast<double>(scratch_.sums[own.place].max) - sets_[own.set].max);
    }
    if (threadIdx.x == 0) {
      head_.max = max;
      scratch_.code_factor = codes.sum > 0 ? exp(codes.reference - max) : 0.0;
      scratch_.sink_part = scratch_.sink > -INFINITY ? exp(scratch_.sink - max) : 0.0;
    }
    __syncthreads();
  }

  // Fills totals: the sets' vectors, four elements a thread at a time; of the exact rows only
  // sum x v. The next barrier completes them.
  __device__ void AddVectors() {
    const int exact_tasks = (kChains * (d_ / 4) + 31) / 32 * 32;
    const int set_fours = SetFloats(d_) / 4;
    for (int i = threadIdx.x; i < exact_tasks + strata_ * set_fours; i += kEstimateThreads) {
      if (i < exact_tasks) {  // all lanes of a warp or none
        AddExactFour(i / kChains, i % kChains);
      } else {
        AddStratumFour(1 + (i - exact_tasks) / set_fours, (i - exact_tasks) % set_fours);
      }
    }
  }

  // Exact rows have the most splits, so kChains lanes share them.
  __device__ void AddExactFour(int four, int chain) {
    const bool present = four < d_ / 4;
    float4 sum = make_float4(0, 0, 0, 0);
    if (present) {
      sum =
          SumFours(sets_[0].splits, chain, kChains, u_.partials + values_at() + g_ * d_ + 4 * four,
                   partial_floats_, [&](int j) { return static_cast<float>(scratch_.factors[j]); });
    }
#pragma unroll
    for (int apart = 1; apart < kChains; apart *= 2) {
      sum.x += __shfl_xor_sync(kFullWarp, sum.x, apart);
      sum.y += __shfl_xor_sync(kFullWarp, sum.y, apart);
      sum.z += __shfl_xor_sync(kFullWarp, sum.z, apart);
      sum.w += __shfl_xor_sync(kFullWarp, sum.w, apart);
    }
    if (chain == 0 && present) reinterpret_cast<float4*>(totals_)[four] = sum;
  }

  __device__ void AddStratumFour(int set, int four) {
    const bool squared = four >= d_ / 4;
    const int i = 4 * four;  // in [sum x v, sum x^2 v, sum x^2 y_a y_b]
    const int first = i < d_       ? values_at() + g_ * d_ + i
                      : i < 2 * d_ ? squares_at() + g_ * d_ + i - d_
                                   : projected_at() + g_ * kProjectedPairs + i - 2 * d_;
    reinterpret_cast<float4*>(totals_ + set * SetFloats(d_))[four] =
        SumFours(sets_[set].splits, 0, 1, u_.partials + first, partial_floats_, [&](int j) {
          const auto f = static_cast<float>(scratch_.factors[j]);
          return squared ? f * f : f;
        });
  }

  // Sets the denominators of all rows and of the exact rows. Returns that of all.
  __device__ double AddDenominators(const OwnSplit& own) {
    double part = 0;
    if (own.set >= 0) {
      const RowSet& set = sets_[own.set];
      part = set.rate * set.factor * scratch_.factors[own.place] * scratch_.sums[own.place].sum;
    }
    const TwoSums sums = BlockSums(part, own.set == 0 ? part : 0.0);
    const double rows = sums.first + CodeSum();
    const double all = rows + scratch_.sink_part;
    if (threadIdx.x == 0) {
      scratch_.exact_rows = sums.second;
      head_.row_denominator = rows;
      head_.denominator = all;
      head_.exact_denominator = sums.second + scratch_.sink_part;
      head_.from_codes = false;
      head_.rounding = 0;
    }
    return all;
  }

  // What codes add to D^.
  __device__ double CodeSum() const { return scratch_.code_factor * scratch_.codes.sum; }

  // Returns D^ if it is clearly positive. Otherwise the answer is that of exact rows and codes, and
  // so is the result.
  __device__ double ClearDenominator(double denominator) {
    for (int h = warp_; h < strata_; h += kWarps) {
      const RowSet& set = sets_[1 + h];
      const StratumMoments m = SumsOfX(set);
      if (lane_ != 0) continue;
      SampleVariance variance;
      variance.Add(set.drawn, set.token_count, SpreadOf(set.drawn, set.token_count, m, 0));
      scratch_.x_variances[h] = variance.of_denominator;
    }
    __syncthreads();
    double variance = 0;
    for (int h = 0; h < strata_; ++h) variance += scratch_.x_variances[h];
    // Sums of fp32 are off by their rounding too.
    const double rounding = CodeSum() * 0x1p-20;
    if (IsClearlyPositive(denominator, variance + rounding * rounding)) {
      if (threadIdx.x == 0) head_.rounding = rounding / denominator;
      return denominator;
    }
    const double rows = scratch_.exact_rows + CodeSum();
    const double known = rows + scratch_.sink_part;
    __syncthreads();
    if (threadIdx.x == 0) {
      head_.row_denominator = rows;
      head_.denominator = known;
      head_.from_codes = true;
    }
    __syncthreads();
    return known;
  }

  // Sets the output and the squared norm of its numerator, and returns the latter.
  __device__ double MakeOutput(double denominator) {
    double norm_sq = 0;
    if (threadIdx.x < d_) {
      double numerator = 0;
      if (scratch_.codes.sum > 0) {
        numerator = scratch_.code_factor * scratch_.codes.value[threadIdx.x];
      }
      const int sets = IsCoded() && head_.from_codes ? 1 : 1 + strata_;
      for (int i = 0; i < sets; ++i) {
        numerator += sets_[i].rate * sets_[i].factor * totals_[i * SetFloats(d_) + threadIdx.x];
      }
      head_.outputs[threadIdx.x] = numerator / denominator;
      norm_sq = numerator * numerator;
    }
    norm_sq = BlockSums(norm_sq, 0).first;
    if (threadIdx.x == 0) head_.norm_sq = norm_sq;
    return norm_sq;
  }

  // Whether codes answer for the tail.
  __device__ bool IsCoded() const { return scratch_.codes.predicted != nullptr; }

  __device__ void MeasureCentres() {
    const HeadCodes& codes = scratch_.codes;
    double product = 0, square = 0;
    if (threadIdx.x < d_) {
      const double o = head_.outputs[threadIdx.x];
      product = codes.centre[threadIdx.x] * o;
      square = o * o;
    }
    const TwoSums sums = BlockSums(product, square);
    if (threadIdx.x == 0 && codes.sum > 0) {
      scratch_.centre_square =
          fmax((codes.centre_square - 2 * sums.first) / codes.sum + sums.second, 0.0);
    }
    __syncthreads();
  }

  // The sums of x and x^2 over a stratum's rows; of a coded unit, of x - x^ and its square. All
  // lanes get them.
  __device__ StratumMoments SumsOfX(const RowSet& set) const {
    StratumMoments m{};
    ForSplits(set.splits, lane_, [&](int j) {
      const double f = set.factor * scratch_.factors[j];
      m.sum_x += f * scratch_.sums[j].sum;
      m.sum_xx += f * f * scratch_.sums[j].sum_sq;
      m.sum_xxvv += f * f * scratch_.sums[j].sum_sq_norm;
    });
    m.sum_x = WarpSum(m.sum_x);
    m.sum_xx = WarpSum(m.sum_xx);
    m.sum_xxvv = WarpSum(m.sum_xxvv);
    return m;
  }

  // Sets the strata's spreads and projections. One warp per stratum.
  __device__ void MeasureStrata(double o_norm_sq) {
    for (int h = warp_; h < strata_; h += kWarps) MeasureStratum(h, o_norm_sq);
    __syncthreads();
  }

  __device__ void MeasureStratum(int h, double o_norm_sq) {
    const RowSet& set = sets_[1 + h];
    const float* own = totals_ + (1 + h) * SetFloats(d_);
    const double factor_sq = set.factor * set.factor;
    StratumMoments m = SumsOfX(set);
    double deviation = 0, xxy = 0, oy = 0;  // of y_m, m = lane % 16
    for (int i = lane_; i < d_; i += 32) {
      const double o = head_.outputs[i];
      const double xv = set.factor * own[i];
      const double xvo = xv - o * m.sum_x;
      const double xxv = factor_sq * own[d_ + i];
      m.sum_xv_sq += xv * xv;
      m.sum_xvo_sq += xvo * xvo;
      m.o_dot_sum_xxv += o * xxv;
      deviation += u_.signs.Of(i, xvo);
      xxy += u_.signs.Of(i, xxv);
      oy += u_.signs.Of(i, o);
    }
    static_assert(kProjectionDims == 16);
    deviation += __shfl_xor_sync(kFullWarp, deviation, 16);
    xxy += __shfl_xor_sync(kFullWarp, xxy, 16);
    oy += __shfl_xor_sync(kFullWarp, oy, 16);
    m.sum_xv_sq = WarpSum(m.sum_xv_sq);
    m.sum_xvo_sq = WarpSum(m.sum_xvo_sq);
    m.o_dot_sum_xxv = WarpSum(m.o_dot_sum_xxv);
    StratumProjection& projection = scratch_.projections[h];
    if (lane_ < kProjectionDims) {
      projection.deviation[lane_] = deviation;
      projection.xxy[lane_] = xxy;
      if (h == 0) scratch_.output_projection[lane_] = oy;
    }
    if (lane_ == 0) {
      const bool sampled = set.drawn >= 2 && set.drawn < set.token_count;
      projection.factor =
          sampled ? SpreadFactor(set.drawn, set.token_count) / static_cast<double>(set.drawn - 1)
                  : 0.0;
      projection.xx = m.sum_xx;
      StratumSpread spread = SpreadOf(set.drawn, set.token_count, m, o_norm_sq);
      if (IsCoded()) {
        const double unit = scratch_.code_factor;
        const double predicted =
            unit > 0 ? unit * unit * scratch_.codes.predicted[h].Variance(scratch_.centre_square)
                     : 0.0;
        spread.trace_o = WithPrediction(set.drawn, spread.trace_o, predicted);
      }
      head_.spreads[h] = spread;
    }
  }

  // Trace and squared norm of S', the covariance of the projected output.
  __device__ TwoSums AddCovariance() {
    // One thread per entry and slice of the strata.
    constexpr int kOwnSlices = kEstimateThreads / kProjectedPairs;
    const int pair = threadIdx.x % kProjectedPairs;
    const int own_slice = threadIdx.x / kProjectedPairs;
    for (int slice = own_slice; own_slice < kOwnSlices && slice < kSpreadSlices;
         slice += kOwnSlices) {
      scratch_.slices[slice][pair] = CovarianceEntry(pair, slice);
    }
    __syncthreads();
    double trace = 0, square = 0;
    if (threadIdx.x < kProjectedPairs) {
      double entry = 0;
      for (int k = 0; k < kSpreadSlices; ++k) entry += scratch_.slices[k][threadIdx.x];
      const bool diagonal = threadIdx.x < kProjectionDims;
      if (diagonal) trace = entry;
      square = (diagonal ? 1 : 2) * entry * entry;
    }
    return BlockSums(trace, square);
  }

  // What every kSpreadSlices-th stratum, from `slice` on, adds to an entry of S'.
  __device__ double CovarianceEntry(int pair, int slice) const {
    const int a = pair % kProjectionDims;
    const int b = (a + pair / kProjectionDims) % kProjectionDims;
    double entry = 0;
    for (int h = slice; h < strata_; h += kSpreadSlices) {
      const RowSet& set = sets_[1 + h];
      const StratumProjection& p = scratch_.projections[h];
      if (p.factor == 0) continue;
      const ProjectedSums of_pair = {
          set.factor * set.factor * totals_[(1 + h) * SetFloats(d_) + 2 * d_ + pair],
          p.xxy[a],
          p.xxy[b],
          p.xx,
          p.deviation[a],
          p.deviation[b]};
      entry +=
          p.factor * ProjectedSpread(of_pair, scratch_.output_projection[a],
                                     scratch_.output_projection[b], static_cast<double>(set.drawn));
    }
    return entry;
  }

  // Sets what HeadTotals says of the output's variance. The first warp, whose lane 0 has set the
  // rest.
  __device__ void AddVariances(const TwoSums& covariance) {
    SampleVariance variance{};
    bool drawn = false;
    for (int h = lane_; h < strata_; h += 32) {
      variance.Add(sets_[1 + h].drawn, sets_[1 + h].token_count, head_.spreads[h]);
      drawn |= sets_[1 + h].drawn > 0;
    }
    drawn = __any_sync(kFullWarp, drawn);
    variance.of_output = WarpSum(variance.of_output);
    variance.of_numerator = WarpSum(variance.of_numerator);
    if (lane_ != 0) return;
    head_.norm_sq_unbiased = UnbiasedNormSq(head_.norm_sq, variance.of_numerator);
    head_.variance = variance.of_output;
    head_.degrees = IsCoded() && !drawn ? kPredictedDegrees
                                        : DegreesOfFreedom(d_, variance.of_output, covariance.first,
                                                           covariance.second);
  }

  // Where arrays [G][width] begin in a split's partial sums.
  __device__ int values_at() const { return kSumsFloats * group_; }
  __device__ int squares_at() const { return values_at() + group_ * d_; }
  __device__ int projected_at() const { return squares_at() + group_ * d_; }

  static constexpr int kWarps = kEstimateThreads / 32;
  static constexpr int kChains = 4;

  const AttendShape& shape_;
  const UnitRequest& u_;
  HeadScratch& scratch_;
  HeadSums& head_;
  RowSet* const sets_;
  float* const totals_;
  const int group_;
  const int d_;
  const int g_;
  const int strata_;
  const int64_t partial_floats_;
  const int lane_ = threadIdx.x % 32;
  const int warp_ = threadIdx.x / 32;
};

// Fills `head` for query head g from the splits of phases [0, phases). totals: HeadSumsBytes() of
// shared memory. All threads.
__device__ inline void EstimateHead(const AttendShape& shape, const UnitRequest& u, int g,
                                    int phases, float* totals, HeadSums& head) {
  __shared__ HeadScratch scratch;
  HeadEstimate(shape, u, g, totals, scratch, head).Run(phases);
}

}  // namespace spillway::cuda
