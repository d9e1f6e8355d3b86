#include "host/core/estimate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace spillway {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// D = 10, of which exact rows have 8; ||N||^2 = 100, unbiased 64; variance 0.16 in one direction.
// The relative error is 0.05 z.
HeadTotals Totals() { return {0, 10, 8, 100, 64, 0.16, 1, false, 0, 10}; }

TailTerms Terms() {
  TailTerms terms{};
  terms.tail = Tail::kStratified;
  terms.may_promise = true;
  terms.epsilon = 0.1;
  terms.z = 1.6;            // the error is 0.08
  terms.one_sided_z = 1.5;  // in one direction the quantile would exceed z; z is the limit
  terms.inflation = 1;
  return terms;
}

TEST(Certify, AStatisticalPromise) {
  const HeadCertificate c = Certify(Terms(), false, true, 50, 1000, Totals());
  EXPECT_EQ(c.promise, Promise::kStatistical);
  EXPECT_FLOAT_EQ(c.relative_error, 0.08f);
  EXPECT_FLOAT_EQ(c.tail_mass, 0.2f);
}

TEST(Certify, WhatTakesThePromiseAway) {
  TailTerms ranks = Terms(), tight = Terms();
  ranks.may_promise = false;
  tight.epsilon = 0.0799;
  HeadTotals unknown = Totals(), vanishing = Totals();
  unknown.variance = kInf;
  vanishing.norm_sq_unbiased = 0;
  for (const auto& [terms, limited, totals, error] :
       {std::tuple(ranks, false, Totals(), 0.08f), std::tuple(tight, false, Totals(), 0.08f),
        std::tuple(Terms(), true, Totals(), 0.08f), std::tuple(Terms(), false, unknown, HUGE_VALF),
        std::tuple(Terms(), false, vanishing, HUGE_VALF)}) {
    const HeadCertificate c = Certify(terms, limited, true, 50, 1000, totals);
    EXPECT_EQ(c.promise, Promise::kNone);
    EXPECT_FLOAT_EQ(c.relative_error, error);
  }
  HeadTotals no_number = Totals();
  no_number.variance = kNan;
  EXPECT_EQ(Certify(Terms(), false, true, 50, 1000, no_number).promise, Promise::kNone);
}

// If the ranks do not hold, a promise that rests on them is void, and the error is not known.
TEST(Certify, RanksThatDoNotHoldTakeThePromise) {
  for (const auto& [tail, bound, rests] : {std::tuple(Tail::kStratified, Bound::kRatio, true),
                                           std::tuple(Tail::kUniform, Bound::kRatio, true),
                                           std::tuple(Tail::kUniform, Bound::kPaper, false)}) {
    TailTerms terms = Terms();
    terms.tail = tail;
    terms.bound = bound;
    const HeadCertificate c = Certify(terms, false, false, 50, 1000, Totals());
    EXPECT_EQ(c.promise, rests ? Promise::kNone : Promise::kStatistical);
    EXPECT_FLOAT_EQ(c.relative_error, rests ? HUGE_VALF : 0.08f);
    EXPECT_FLOAT_EQ(c.tail_mass, 0.2f);
  }
}

// If ||o|| is at most a sixteenth of the values' unit, the error is not known.
TEST(Certify, ATinyOutputHasNoKnownError) {
  HeadTotals totals = Totals();
  for (const auto& [norm, known] : {std::pair(10.01 / 16, true), std::pair(10.0 / 16, false),
                                    std::pair(1e-6, false), std::pair(0.0, false)}) {
    totals.norm_sq = norm * norm;
    const HeadCertificate c = Certify(Terms(), false, true, 50, 1000, totals);
    EXPECT_EQ(c.promise, known ? Promise::kStatistical : Promise::kNone) << norm;
    EXPECT_FLOAT_EQ(c.relative_error, known ? 0.08f : HUGE_VALF) << norm;
  }
  EXPECT_EQ(Certify(Terms(), false, true, 1000, 1000, totals).promise, Promise::kExact);
}

TEST(Certify, AnErrorOfEpsilonIsWithinIt) {
  TailTerms terms = Terms();
  terms.epsilon = 1.6 * std::sqrt(0.16 / 64);
  EXPECT_EQ(Certify(terms, false, true, 50, 1000, Totals()).promise, Promise::kStatistical);
}

TEST(Certify, AllOfTheTailIsExactWhateverElse) {
  TailTerms terms = Terms();
  terms.may_promise = false;
  const HeadCertificate c = Certify(terms, true, false, 1000, 1000, Totals());
  EXPECT_EQ(c.promise, Promise::kExact);
  EXPECT_EQ(c.relative_error, 0);
  EXPECT_FLOAT_EQ(c.tail_mass, 0.2f);
}

TEST(Certify, WithoutASampleNothingIsKnown) {
  const HeadCertificate c = Certify(Terms(), false, true, 0, 1000, Totals());
  EXPECT_EQ(c.promise, Promise::kNone);
  EXPECT_EQ(c.relative_error, HUGE_VALF);
  EXPECT_TRUE(std::isnan(c.tail_mass));
}

TEST(Certify, LshSamplingPromisesNothing) {
  TailTerms terms = Terms();
  terms.tail = Tail::kLshSampling;
  const HeadCertificate c = Certify(terms, false, true, 1000, 1000, Totals());
  EXPECT_EQ(c.promise, Promise::kNone);
  EXPECT_EQ(c.relative_error, HUGE_VALF);
  EXPECT_FLOAT_EQ(c.tail_mass, 0.2f);
}

TEST(RelativeError, WithoutVarianceThereIsNone) {
  HeadTotals totals = Totals();
  totals.variance = 0;
  totals.norm_sq_unbiased = 0;
  EXPECT_EQ(RelativeError(Terms(), totals), 0);
}

// An error in many directions varies little: its quantile falls to one standard deviation.
TEST(RelativeError, FallsWithTheErrorsDegreesWhereItRestsOnRanks) {
  TailTerms terms = Terms();
  for (const auto& [tail, bound, falls] :
       {std::tuple(Tail::kStratified, Bound::kRatio, true),
        std::tuple(Tail::kStratified, Bound::kPaper, true),
        std::tuple(Tail::kUniform, Bound::kRatio, true),
        std::tuple(Tail::kUniform, Bound::kPaper, false),
        std::tuple(Tail::kUniform, Bound::kDenominator, false)}) {
    terms.tail = tail;
    terms.bound = bound;
    HeadTotals totals = Totals();
    EXPECT_NEAR(RelativeError(terms, totals), 0.08, 1e-12);
    totals.degrees = 1e15;
    EXPECT_NEAR(RelativeError(terms, totals), falls ? 0.05 : 0.08, 1e-6);
    // 8 degrees: (1 - 1/36 + 1.5 / 6)^3 = 1.2222^3 = 1.8258, its root 1.3512.
    totals.degrees = 8;
    EXPECT_NEAR(RelativeError(terms, totals), falls ? 0.05 * 1.3512 : 0.08, 1e-5);
  }
}

// Two rows with x = 1, 3 and v = (2, 0), (0, 4), d = 2; o = (1, 1).
StratumMoments TwoRows() {
  return {.sum_x = 4,
          .sum_xx = 10,
          .sum_xxvv = 4 + 144,
          .sum_xv_sq = 4 + 144,  // (2, 12)
          .sum_xvo_sq = 4 + 64,  // (-2, 8)
          .o_dot_sum_xxv = 2 + 36};
}

TEST(SpreadOf, TwoRows) {
  // x (v - o): (1, -1) and (-3, 9); x v: (2, 0) and (0, 12).
  const StratumSpread s = SpreadOf(2, 100, TwoRows(), 2);
  EXPECT_DOUBLE_EQ(s.variance_x, 2);
  EXPECT_DOUBLE_EQ(s.trace_n, 2 + 72);
  EXPECT_DOUBLE_EQ(s.trace_o, 8 + 50);
}

TEST(SpreadOf, TooFewRowsSayNothing) {
  for (const auto& [drawn, count, spread] :
       {std::tuple(1, 100, kInf), std::tuple(1, 1, 0.0), std::tuple(0, 100, 0.0)}) {
    const StratumSpread s = SpreadOf(drawn, count, TwoRows(), 2);
    EXPECT_EQ(s.trace_o, spread);
    EXPECT_EQ(s.trace_n, spread);
    EXPECT_EQ(s.variance_x, spread);
  }
}

TEST(SpreadOf, SumsOutOfRangeAreInfiniteAndRoundingIsZero) {
  StratumMoments wide = TwoRows(), below = TwoRows();
  wide.sum_xxvv = kInf;
  wide.sum_xv_sq = kInf;
  EXPECT_EQ(SpreadOf(2, 100, wide, 2).trace_n, kInf);
  EXPECT_EQ(SpreadOf(2, 100, wide, 2).trace_o, kInf);
  below.sum_xx = 7.9999999;
  EXPECT_EQ(SpreadOf(2, 100, below, 2).variance_x, 0);
}

TEST(SampleVariance, AddsByTheFinitePopulation) {
  SampleVariance variance{};
  variance.Add(10, 100, {2, 3, 0});  // 100^2 (1/10 - 1/100) = 900
  variance.Add(100, 100, {kInf, kInf, 0});
  variance.Add(0, 100, {kInf, kInf, 0});
  EXPECT_DOUBLE_EQ(variance.of_output, 1800);
  EXPECT_DOUBLE_EQ(variance.of_numerator, 2700);
  EXPECT_NEAR(UnbiasedNormSq(2700.5, variance.of_numerator), 0.5, 1e-9);
  EXPECT_EQ(UnbiasedNormSq(2699, variance.of_numerator), 0);
  EXPECT_EQ(UnbiasedNormSq(1, kInf), 0);
}

TEST(HeadBudgets, AUniformTailInflatesTracesBySquares) {
  TailTerms terms = Terms();
  terms.tail = Tail::kUniform;
  terms.bound = Bound::kRatio;
  terms.z = 2;
  terms.one_sided_z = 3;
  terms.inflation = 3;
  // (z n sqrt(9 T_o) / (eps ||N||))^2 = (2 * 10000 * sqrt(9 * 1e-4) / (0.1 * 8))^2
  // = 750^2; corrected 562500 / (1 + 56.25) = 9825.3.
  const StratumSpread spread{1e-4, 5, 7};
  const std::vector<NeymanStratum> strata = {BudgetStratum(terms, 10000, 48, spread)};
  std::vector<int64_t> budgets(1);
  HeadBudgets(terms, Totals(), spread, strata, budgets);
  EXPECT_EQ(budgets[0], 9826);
}

TEST(HeadBudgets, StrataAreAllottedByTheirDeviations) {
  TailTerms terms = Terms();
  terms.inflation = 2;
  // One free stratum: n T = 1000 * 2 * sqrt(4e-4) = 40, variance allowed
  // (0.1 * 8 / 1.6)^2 = 0.25: b = 1600 / (0.25 + 1000 * 0.0016) = 864.9.
  const StratumSpread spread{4e-4, 0, 0}, none{0, 0, 0};
  const std::vector<NeymanStratum> strata = {BudgetStratum(terms, 1000, 48, spread),
                                             BudgetStratum(terms, 500, 20, none)};
  std::vector<int64_t> budgets(2);
  HeadBudgets(terms, Totals(), spread, strata, budgets);
  EXPECT_EQ(budgets, (std::vector<int64_t>{865, 20}));
}

// A bound that does not rest on ranks has its own quantile.
TEST(HeadBudgets, DegreesAreForBoundsThatRestOnRanks) {
  const StratumSpread spread{1e-4, 1e-4, 1e-6};
  std::vector<int64_t> budgets(1);
  HeadTotals many = Totals();
  many.degrees = 1e15;
  for (const auto& [tail, bound, fewer] :
       {std::tuple(Tail::kStratified, Bound::kRatio, true),
        std::tuple(Tail::kUniform, Bound::kRatio, true),
        std::tuple(Tail::kUniform, Bound::kPaper, false),
        std::tuple(Tail::kUniform, Bound::kDenominator, false)}) {
    TailTerms terms = Terms();
    terms.tail = tail;
    terms.bound = bound;
    terms.bound_z = 1.6;
    const std::vector<NeymanStratum> strata = {BudgetStratum(terms, 1000000, 48, spread)};
    HeadBudgets(terms, Totals(), spread, strata, budgets);
    const int64_t one = budgets[0];
    HeadBudgets(terms, many, spread, strata, budgets);
    EXPECT_GT(budgets[0], 48);
    if (fewer) {
      // b: rows with replacement at z = 1; grows as z^2. Without replacement, a tail of n tokens
      // needs b / (1 + b / n).
      const double n = 1e6, b = 1e12 * 1e-4 / (0.1 * 0.1 * 64);
      EXPECT_NEAR(budgets[0], b / (1 + b / n), 1) << static_cast<int>(bound);
      EXPECT_NEAR(one, 2.56 * b / (1 + 2.56 * b / n), 1) << static_cast<int>(bound);
    } else {
      EXPECT_EQ(budgets[0], one) << static_cast<int>(bound);
    }
  }
}

TEST(HeadBudgets, EveryRowWhereNothingIsKnown) {
  const StratumSpread spread{1, 1, 1};
  for (const Tail tail : {Tail::kUniform, Tail::kStratified}) {
    for (const auto& [norm, variance] :
         {std::pair(0.0, 1.0), std::pair(1.0, kInf), std::pair(1.0, kNan)}) {
      TailTerms terms = Terms();
      terms.tail = tail;
      HeadTotals totals = Totals();
      totals.norm_sq_unbiased = norm;
      totals.variance = variance;
      const std::vector<NeymanStratum> strata = {{1000, 48, 1}, {77, 48, 1}};
      std::vector<int64_t> budgets(2);
      HeadBudgets(terms, totals, spread, strata, budgets);
      EXPECT_EQ(budgets, (std::vector<int64_t>{1000, 77}));
    }
  }
}

}  // namespace
}  // namespace spillway
