#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>

#include "host/base/certificate.h"
#include "host/core/budget.h"
#include "host/core/degrees.h"
#include "host/core/host_device.h"
#include "host/core/neyman.h"
#include "host/core/tail.h"

// What sums over rows say about one query head's output o = N / D: its error,
// the budgets that a bound asks for, and the certificate. fp64; everything in
// units of x = exp(logit - M), M a reference common to all sums, and of a unit of
// values (HeadStatistics::value_unit). Host and device sum up in their own ways
// and call these functions with the sums.
namespace spillway {

// Sums over a stratum's rows for one query head.
struct StratumMoments {
  double sum_x;
  double sum_xx;         // sum x^2
  double sum_xxvv;       // sum x^2 ||v||^2
  double sum_xv_sq;      // ||sum x v||^2
  double sum_xvo_sq;     // ||sum x (v - o)||^2
  double o_dot_sum_xxv;  // o . sum x^2 v
};

// What a stratum's rows vary by, with the m-1 divisor.
struct StratumSpread {
  double trace_o;     // Tr Cov[x (v - o)]
  double trace_n;     // Tr Cov[x v]
  double variance_x;  // Var[x]
};

// Of r_h = drawn rows of n_h = token_count. One row says nothing of a spread:
// infinity, unless it is all there is; no row adds nothing.
SPILLWAY_HOST_DEVICE inline StratumSpread SpreadOf(int64_t drawn, int64_t token_count,
                                                   const StratumMoments& m, double o_norm_sq) {
  if (drawn < 2) {
    const double unknown = drawn == token_count || drawn == 0 ? 0.0 : HUGE_VAL;
    return {unknown, unknown, unknown};
  }
  const double r = static_cast<double>(drawn);
  // Rounding may leave a little below 0; sums that passed fp32's range are
  // known to say nothing.
  const auto settled = [](double v) {
    return !(v < HUGE_VAL) || !(v > -HUGE_VAL) ? HUGE_VAL : v > 0 ? v : 0.0;
  };
  return {settled((m.sum_xxvv - 2 * m.o_dot_sum_xxv + o_norm_sq * m.sum_xx - m.sum_xvo_sq / r) /
                  (r - 1)),
          settled((m.sum_xxvv - m.sum_xv_sq / r) / (r - 1)),
          settled((m.sum_xx - m.sum_x * m.sum_x / r) / (r - 1))};
}

// n_h / r_h: what each of a stratum's rows stands for.
SPILLWAY_HOST_DEVICE inline double StratumRate(int64_t drawn, int64_t token_count) {
  return static_cast<double>(token_count) / static_cast<double>(drawn);
}

// n_h^2 (1/r_h - 1/n_h): what a stratum's covariance of one row is times in that
// of the sums that stand for all rows.
SPILLWAY_HOST_DEVICE inline double SpreadFactor(int64_t drawn, int64_t token_count) {
  const double n = static_cast<double>(token_count);
  return n * n * (1 / static_cast<double>(drawn) - 1 / n);
}

// Variances of N^ - o D^ and of N^, sums over the strata of SpreadFactor() times
// their traces.
struct SampleVariance {
  double of_output = 0;
  double of_numerator = 0;

  SPILLWAY_HOST_DEVICE void Add(int64_t drawn, int64_t token_count, const StratumSpread& spread) {
    if (drawn == 0 || drawn >= token_count) return;
    const double factor = SpreadFactor(drawn, token_count);
    of_output += factor * spread.trace_o;
    of_numerator += factor * spread.trace_n;
  }
};

// ||N||^2 from that of the estimate, which is biased upward by its own
// variance; 0 when that is unknown or larger.
SPILLWAY_HOST_DEVICE inline double UnbiasedNormSq(double norm_sq, double numerator_variance) {
  const double less = norm_sq - numerator_variance;
  return less > 0 ? less : 0.0;
}

// One query head, sums over all rows done.
struct HeadTotals {
  double max;                // M
  double denominator;        // D^
  double exact_denominator;  // the part of it from sink, window and heavy set
  double norm_sq;            // ||N^||^2
  double norm_sq_unbiased;   // UnbiasedNormSq()
  double variance;           // SampleVariance::of_output
  double degrees;            // DegreesOfFreedom() of the error
};

// What error / sqrt(variance) exceeds with chance delta.
SPILLWAY_HOST_DEVICE inline double HeadQuantile(const TailTerms& terms, double degrees) {
  return RestsOnRanks(terms.tail, terms.bound) ? ErrorQuantile(degrees, terms.one_sided_z, terms.z)
                                               : terms.z;
}

// Relative error at confidence 1 - delta: z sqrt(variance) / ||N|| with the
// unbiased norm; 0 without variance, infinity when the norm vanishes under it.
SPILLWAY_HOST_DEVICE inline double RelativeError(const TailTerms& terms, const HeadTotals& head) {
  if (head.variance == 0) return 0;
  return head.norm_sq_unbiased > 0
             ? HeadQuantile(terms, head.degrees) * ::sqrt(head.variance / head.norm_sq_unbiased)
             : HUGE_VAL;
}

// ||o|| in the unit of values from which an estimate may promise. Below it sums
// of squares in fp32 could miss what decides.
inline constexpr double kOutputNormMin = 1.0 / 16;
SPILLWAY_HOST_DEVICE inline bool OutputIsLargeEnough(const HeadTotals& head) {
  return head.norm_sq > kOutputNormMin * kOutputNormMin * (head.denominator * head.denominator);
}

// A stratum as its budget sees it; floor: rows that it has at least.
SPILLWAY_HOST_DEVICE inline NeymanStratum BudgetStratum(const TailTerms& terms, int64_t token_count,
                                                        int64_t floor,
                                                        const StratumSpread& spread) {
  return {token_count, floor, terms.inflation * ::sqrt(spread.trace_o)};
}

// Rows per stratum that the bound asks for to keep one head's error within
// epsilon. first: the spread of stratum 0, all that a uniform tail has. strata and
// budgets have a place per stratum that walk goes through.
template <typename Walk>
SPILLWAY_HOST_DEVICE inline void HeadBudgets(const Walk& walk, const TailTerms& terms,
                                             const HeadTotals& head, const StratumSpread& first,
                                             const NeymanStratum* strata, int64_t* budgets) {
  if (!(head.norm_sq_unbiased > 0) || !(head.variance < HUGE_VAL)) {
    // Nothing can be said of the error without reading every row.
    walk.ForEach([&](int h) { budgets[h] = strata[h].token_count; });
    return;
  }
  if (terms.tail == Tail::kUniform) {
    // A factor on deviations; traces are squares of them.
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

// In turn.
inline void HeadBudgets(const TailTerms& terms, const HeadTotals& head, const StratumSpread& first,
                        std::span<const NeymanStratum> strata, std::span<int64_t> budgets) {
  HeadBudgets(StrataInTurn{static_cast<int>(strata.size())}, terms, head, first, strata.data(),
              budgets.data());
}

// What a certificate says of one query head.
struct HeadCertificate {
  Promise promise = Promise::kNone;
  float relative_error = HUGE_VALF;
  float tail_mass = 0;
};

// drawn of the tail's tail_count tokens were read; limited: row_count_max bound
// the draw; ranks_hold: whether the ranks may carry a promise (rank_error.h, and
// no stray was left out).
SPILLWAY_HOST_DEVICE inline HeadCertificate Certify(const TailTerms& terms, bool limited,
                                                    bool ranks_hold, int64_t drawn,
                                                    int64_t tail_count, const HeadTotals& head) {
  const float tail_mass = static_cast<float>(1 - head.exact_denominator / head.denominator);
  if (!IsPlanned(terms.tail)) return {Promise::kNone, HUGE_VALF, tail_mass};
  if (drawn == tail_count) return {Promise::kExact, 0.0f, tail_mass};
  if (drawn == 0) return {Promise::kNone, HUGE_VALF, std::bit_cast<float>(0x7FC00000u)};
  const bool known =
      OutputIsLargeEnough(head) && (ranks_hold || !RestsOnRanks(terms.tail, terms.bound));
  const double error = known ? RelativeError(terms, head) : HUGE_VAL;
  const bool promises = terms.may_promise && !limited && error <= terms.epsilon;
  return {promises ? Promise::kStatistical : Promise::kNone, static_cast<float>(error), tail_mass};
}

// Whether a third draw may let the head promise: its error came out above what
// the second draw was to keep it within, and nothing else speaks against it. The
// deviations that its budget goes by count more than the policy says by this
// factor, for they were underestimated once.
inline constexpr double kMoreInflation = 1.25;
SPILLWAY_HOST_DEVICE inline bool WantsMoreRows(const TailTerms& terms, bool limited,
                                               const HeadCertificate& certificate) {
  return terms.may_promise && !limited && certificate.promise == Promise::kNone &&
         certificate.relative_error < HUGE_VALF;
}

}  // namespace spillway
