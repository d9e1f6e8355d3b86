#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>

#include "host/base/certificate.h"
#include "host/base/host_device.h"
#include "host/base/limits.h"
#include "host/core/budget.h"
#include "host/core/degrees.h"
#include "host/core/neyman.h"
#include "host/core/page_index.h"
#include "host/core/tail.h"

// Computes, from sums over rows, the error of one query head's output o = N / D, the budgets that a
// bound needs, and the certificate. All in fp64. Sums are in units of x = exp(logit - M), where M
// is a reference common to all sums, and values are in units of HeadStatistics::value_unit. Host
// and device sum in their own ways and call these functions with the sums.
namespace spillway {

// Sums over one stratum's sampled rows, for one query head.
struct StratumMoments {
  double sum_x;
  double sum_xx;         // sum x^2
  double sum_xxvv;       // sum x^2 ||v||^2
  double sum_xv_sq;      // ||sum x v||^2
  double sum_xvo_sq;     // ||sum x (v - o)||^2
  double o_dot_sum_xxv;  // o . sum x^2 v
};

// Variances of one row within a stratum, estimated with divisor r - 1.
struct StratumSpread {
  double trace_o;     // Tr Cov[x (v - o)]
  double trace_n;     // Tr Cov[x v]
  double variance_x;  // Var[x]
};

// drawn: r_h, the rows sampled out of token_count = n_h. One row gives no variance: the result is
// infinity, unless the stratum has only this row. A stratum without sampled rows gives 0.
SPILLWAY_HOST_DEVICE inline StratumSpread SpreadOf(int64_t drawn, int64_t token_count,
                                                   const StratumMoments& m, double o_norm_sq) {
  if (drawn < 2) {
    const double unknown = drawn == token_count || drawn == 0 ? 0.0 : HUGE_VAL;
    return {unknown, unknown, unknown};
  }
  const double r = static_cast<double>(drawn);
  // Rounding may leave a result slightly below 0. If a sum has overflowed fp32, the variance is
  // unknown: infinity.
  const auto settled = [](double v) {
    return !(v < HUGE_VAL) || !(v > -HUGE_VAL) ? HUGE_VAL : v > 0 ? v : 0.0;
  };
  return {settled((m.sum_xxvv - 2 * m.o_dot_sum_xxv + o_norm_sq * m.sum_xx - m.sum_xvo_sq / r) /
                  (r - 1)),
          settled((m.sum_xxvv - m.sum_xv_sq / r) / (r - 1)),
          settled((m.sum_xx - m.sum_x * m.sum_x / r) / (r - 1))};
}

// n_h / r_h: the number of tokens that each sampled row of a stratum stands for.
SPILLWAY_HOST_DEVICE inline double StratumRate(int64_t drawn, int64_t token_count) {
  return static_cast<double>(token_count) / static_cast<double>(drawn);
}

// n_h^2 (1/r_h - 1/n_h): the variance of a stratum's estimated sum over all n_h tokens, divided by
// the variance of one row.
SPILLWAY_HOST_DEVICE inline double SpreadFactor(int64_t drawn, int64_t token_count) {
  const double n = static_cast<double>(token_count);
  return n * n * (1 / static_cast<double>(drawn) - 1 / n);
}

// Variances (traces) of N^ - o D^, of N^, and of D^: sums over the strata of SpreadFactor() times
// the traces of one row.
struct SampleVariance {
  double of_output = 0;
  double of_numerator = 0;
  double of_denominator = 0;

  SPILLWAY_HOST_DEVICE void Add(int64_t drawn, int64_t token_count, const StratumSpread& spread) {
    if (drawn == 0 || drawn >= token_count) return;
    const double factor = SpreadFactor(drawn, token_count);
    of_output += factor * spread.trace_o;
    of_numerator += factor * spread.trace_n;
    of_denominator += factor * spread.variance_x;
  }
};

// Whether D^ is clearly positive. With value codes, the terms of a sample are x - x^, which may be
// negative: if codes overestimate, D^ may be near 0 or below, and N^ / D^ and log D^ say nothing.
// Then the codes' own answer is used, and its certificate carries no bound.
inline constexpr double kClearDeviations = 4;
SPILLWAY_HOST_DEVICE inline bool IsClearlyPositive(double denominator, double variance) {
  return denominator > 0 &&
         denominator * denominator > kClearDeviations * kClearDeviations * variance;
}

// An estimate of ||N||^2. ||N^||^2 is biased upward by the variance of N^, which is subtracted. 0
// if that variance is larger, or unknown (infinite).
SPILLWAY_HOST_DEVICE inline double UnbiasedNormSq(double norm_sq, double numerator_variance) {
  const double less = norm_sq - numerator_variance;
  return less > 0 ? less : 0.0;
}

// Sums of one query head over all sampled and exact rows.
struct HeadTotals {
  double max;                // M
  double denominator;        // D^, with the head's sink logit
  double exact_denominator;  // the part of D^ from sink, window, heavy set and sink logit
  double norm_sq;            // ||N^||^2
  double norm_sq_unbiased;   // UnbiasedNormSq()
  double variance;           // SampleVariance::of_output
  double degrees;            // DegreesOfFreedom() of the error
  bool from_codes;           // the sample gave no clear D^: N and D are those of codes alone
  double rounding;           // error of D^ that fp32 sums of codes may have, relative to D^
  double row_denominator;    // D^ without the sink logit
};

// With codes, an answer from all rows still has what fp32 sums of terms x - x^ round. It counts as
// exact only if that is less than this.
inline constexpr double kExactRounding = 0x1p-12;

// The value that error / sqrt(variance) exceeds with probability delta.
SPILLWAY_HOST_DEVICE inline double HeadQuantile(const TailTerms& terms, double degrees) {
  return RestsOnRanks(terms.tail, terms.bound) ? ErrorQuantile(degrees, terms.one_sided_z, terms.z)
                                               : terms.z;
}

// Relative error at confidence 1 - delta: z sqrt(variance) / ||N||, with the unbiased norm. 0 if
// the variance is 0; infinity if the unbiased norm is 0.
SPILLWAY_HOST_DEVICE inline double RelativeError(const TailTerms& terms, const HeadTotals& head) {
  if (head.variance == 0) return 0;
  return head.norm_sq_unbiased > 0
             ? HeadQuantile(terms, head.degrees) * ::sqrt(head.variance / head.norm_sq_unbiased)
             : HUGE_VAL;
}

// Certificates may promise an error only if ||N|| / D is above this, in units of value_unit, where
// D is that of the rows, without the sink logit. Below it, the fp32 sums of squares may miss the
// values that matter. A sink logit makes the output small, but not the values.
inline constexpr double kOutputNormMin = 1.0 / 16;
SPILLWAY_HOST_DEVICE inline bool OutputIsLargeEnough(const HeadTotals& head) {
  return head.norm_sq >
         kOutputNormMin * kOutputNormMin * (head.row_denominator * head.row_denominator);
}

// A stratum as the budget computation takes it. floor: the minimum of the budget: the rows already
// drawn or, before the first draw of a tail with value codes, FirstDrawRows().
SPILLWAY_HOST_DEVICE inline NeymanStratum BudgetStratum(const TailTerms& terms, int64_t token_count,
                                                        int64_t floor,
                                                        const StratumSpread& spread) {
  return {token_count, floor, terms.inflation * ::sqrt(spread.trace_o)};
}

// Computes how many rows per stratum keep one head's error within epsilon by the policy's bound.
// first: the spread of stratum 0, the only stratum of a uniform tail. strata and budgets have one
// entry for each stratum of walk.
template <typename Walk>
SPILLWAY_HOST_DEVICE inline void HeadBudgets(const Walk& walk, const TailTerms& terms,
                                             const HeadTotals& head, const StratumSpread& first,
                                             const NeymanStratum* strata, int64_t* budgets) {
  if (!(head.norm_sq_unbiased > 0) || !(head.variance < HUGE_VAL)) {
    // The error is unknown unless every row is read.
    walk.ForEach([&](int h) { budgets[h] = strata[h].token_count; });
    return;
  }
  if (terms.tail == Tail::kUniform) {
    // inflation multiplies standard deviations; traces are squares of them.
    const double inflation_sq = terms.inflation * terms.inflation;
    const UniformTail tail{static_cast<double>(strata[0].token_count),
                           terms.inflation * ::sqrt(first.variance_x),
                           inflation_sq * first.trace_n,
                           inflation_sq * first.trace_o,
                           ::sqrt(head.norm_sq_unbiased),
                           head.denominator};
    const double z =
        terms.bound == Bound::kRatio ? HeadQuantile(terms, head.degrees) : terms.bound_z;
    const int64_t rows = FinitePopulation(UniformBudget(terms.bound, tail, terms.epsilon, z),
                                          strata[0].token_count, strata[0].floor);
    walk.ForEach([&](int h) { budgets[h] = rows; });
    return;
  }
  const double least = terms.epsilon / HeadQuantile(terms, head.degrees);
  NeymanAllot(walk, strata, least * least * head.norm_sq_unbiased, budgets);
}

// The budgets that make D^ clear, for a head whose D^ is not. spreads: per stratum. strata: with
// floors; deviations are set here.
template <typename Walk>
SPILLWAY_HOST_DEVICE inline void ClearBudgets(const Walk& walk, const TailTerms& terms,
                                              const HeadTotals& head, const StratumSpread* spreads,
                                              NeymanStratum* strata, int64_t* budgets) {
  walk.ForEach(
      [&](int h) { strata[h].deviation = terms.inflation * ::sqrt(spreads[h].variance_x); });
  const double deviation = head.denominator / kClearDeviations;
  NeymanAllot(walk, strata, deviation * deviation, budgets);
}

// HeadBudgets(), sequentially.
inline void HeadBudgets(const TailTerms& terms, const HeadTotals& head, const StratumSpread& first,
                        std::span<const NeymanStratum> strata, std::span<int64_t> budgets) {
  HeadBudgets(StrataInTurn{static_cast<int>(strata.size())}, terms, head, first, strata.data(),
              budgets.data());
}

// The smallest error that a certificate of a sampled tail states, unless epsilon is smaller: then
// it is the power of two below epsilon. A tail of little weight is measured by few rows, and its
// weight may be in tokens that the index ranks too low and the sample has missed. So smaller
// estimates are exceeded more often than delta says (docs/certificates.md has the figures); errors
// above this one are not.
inline constexpr double kStatedErrorMin = 1.0 / 64;
SPILLWAY_HOST_DEVICE inline double StatedError(double error, double epsilon) {
  // A power of two, so that it is not above epsilon after rounding to fp32 either.
  const double least =
      epsilon < kStatedErrorMin ? PowerOfTwoBelow(static_cast<float>(epsilon)) : kStatedErrorMin;
  return error > least ? error : least;
}

// The part of a certificate that depends on the query head.
struct HeadCertificate {
  Promise promise = Promise::kNone;
  float relative_error = HUGE_VALF;
  float tail_mass = 0;
};

// drawn: how many of the tail's tail_count tokens were read. limited: whether row_count_max limited
// the sample. ranks_hold: whether the ranks are good enough for an error bound: RanksHold(), no
// stray was left out, and ValuesCanBeSampled().
SPILLWAY_HOST_DEVICE inline HeadCertificate Certify(const TailTerms& terms, bool limited,
                                                    bool ranks_hold, int64_t drawn,
                                                    int64_t tail_count, const HeadTotals& head) {
  // D^ may be below its exact part, because terms x - x^ may be negative.
  const double beyond = 1 - head.exact_denominator / head.denominator;
  const float tail_mass = static_cast<float>(beyond < 0 ? 0.0 : beyond);
  if (!IsPlanned(terms.tail)) return {Promise::kNone, HUGE_VALF, tail_mass};
  if (drawn == tail_count && !head.from_codes) {
    return head.rounding < kExactRounding ? HeadCertificate{Promise::kExact, 0.0f, tail_mass}
                                          : HeadCertificate{Promise::kNone, HUGE_VALF, tail_mass};
  }
  if (drawn == 0) return {Promise::kNone, HUGE_VALF, std::bit_cast<float>(0x7FC00000u)};
  const bool known = !head.from_codes && OutputIsLargeEnough(head) &&
                     (ranks_hold || !RestsOnRanks(terms.tail, terms.bound));
  const double error = known ? RelativeError(terms, head) : HUGE_VAL;
  const bool promises = terms.may_promise && !limited && error <= terms.epsilon;
  return {promises ? Promise::kStatistical : Promise::kNone,
          static_cast<float>(StatedError(error, terms.epsilon)), tail_mass};
}

// Whether a third draw may give the head an error bound: its error after the second draw is above
// epsilon, and nothing else prevents a bound. The third draw's budgets multiply the policy's
// inflation by kMoreInflation, because the standard deviations were underestimated before.
inline constexpr double kMoreInflation = 1.25;
SPILLWAY_HOST_DEVICE inline bool WantsMoreRows(const TailTerms& terms, bool limited,
                                               const HeadCertificate& certificate) {
  return terms.may_promise && !limited && certificate.promise == Promise::kNone &&
         certificate.relative_error < HUGE_VALF;
}

// With value codes, the first draw's budgets come from predicted variances
// (host/core/value_code.h), and no pilot is drawn. A stratum gets at least FirstDrawRows(), so that
// its variance can be estimated. The error's degrees of freedom are not known before, and are taken
// to be kPredictedDegrees.
inline constexpr int64_t kFirstDrawRows = kStratumRowsMin;
inline constexpr double kPredictedDegrees = 8;
// The policy's inflation makes up for deviations that are estimated from few rows. Predicted ones
// are not, so they are multiplied by 1 for the default inflation.
inline constexpr double kInflationOfFewRows = 1.25;
SPILLWAY_HOST_DEVICE inline double PredictedInflation(double inflation) {
  return inflation / kInflationOfFewRows;
}
// A variance that is estimated from few rows may be far too small by chance. The prediction counts
// as much as kPredictedRows rows, but only where it is larger: it rests on assumptions, the rows do
// not.
inline constexpr double kPredictedRows = 8;
SPILLWAY_HOST_DEVICE inline double WithPrediction(int64_t drawn, double estimated,
                                                  double predicted) {
  if (drawn < 2) return drawn == 0 ? predicted : estimated;
  const double rows = static_cast<double>(drawn - 1);
  const double mean = (rows * estimated + kPredictedRows * predicted) / (rows + kPredictedRows);
  return mean > estimated ? mean : estimated;
}

// The rows of a stratum of token_count tokens that are drawn in any case: a third of a pilot, and
// at least kFirstDrawRows. Small strata are taken whole.
SPILLWAY_HOST_DEVICE inline int64_t FirstDrawRows(int64_t pilot_count, int64_t token_count) {
  const int64_t third = pilot_count / 3;
  const int64_t least = third > kFirstDrawRows ? third : kFirstDrawRows;
  return token_count > 2 * least ? least : token_count;
}

// Whether the first draw does not suffice: the certificate's error is above epsilon, or unknown.
SPILLWAY_HOST_DEVICE inline bool WantsSecondDraw(const TailTerms& terms, bool limited,
                                                 const HeadCertificate& certificate) {
  return !limited && !(certificate.relative_error <= terms.epsilon);
}

}  // namespace spillway
