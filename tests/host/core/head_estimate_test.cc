#include "host/core/head_estimate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/reference/tail.h"

namespace spillway {
namespace {

// Rows with random logits and values. SumRows adds them up as a device does, but in fp64, rounded
// to fp32 at the end.
struct Rows {
  reference::KeyValues kv;
  std::vector<double> logits;
};

Rows RandomRows(int64_t n, int d, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Rows rows;
  rows.kv = {n, d, std::vector<double>(n * d), std::vector<double>(n * d)};
  for (double& v : rows.kv.v) v = 0.7 + normal(random);
  rows.logits.resize(n);
  for (double& l : rows.logits) l = 2 * normal(random);
  return rows;
}

struct Sums {
  RowSums sums;
  std::vector<float> value;
  std::vector<float> value_sq;
  std::vector<float> projected;

  StratumSums Stratum(int64_t token_count) const {
    return {token_count, sums, value, value_sq, projected};
  }
};

// The projection sign of a dimension: +1 or -1.
float Sign(int i) { return i * 7 % 5 < 2 ? -1.0f : 1.0f; }

std::vector<float> Signs(int d) {
  std::vector<float> signs(d);
  for (int i = 0; i < d; ++i) signs[i] = Sign(i);
  return signs;
}

// With codes, whose sums are in units of exp(reference): x v - x^ v^ and x - x^ in place of x v and
// x.
Sums SumRows(const Rows& rows, const std::vector<uint32_t>& tokens,
             const reference::CodeTerms* codes = nullptr) {
  const int d = rows.kv.d;
  double max = -std::numeric_limits<double>::infinity();
  for (uint32_t t : tokens) max = std::max(max, rows.logits[t]);
  max = static_cast<float>(max);
  double sum = 0, sum_sq = 0, sum_sq_norm = 0;
  std::vector<double> value(d), value_sq(d), projected(kProjectionEntries);
  for (uint32_t t : tokens) {
    const double unit = codes == nullptr ? 0 : std::exp(codes->reference - max);
    const double x = std::exp(rows.logits[t] - max);
    const double b = codes == nullptr ? x : x - unit * codes->weights[t];
    sum += b;
    sum_sq += b * b;
    double y[kProjectionDims] = {};
    for (int i = 0; i < d; ++i) {
      const double v = codes == nullptr ? 0 : unit * codes->values[t][i];
      const double a = x * rows.kv.Value(t)[i] - v;
      sum_sq_norm += a * a;
      value[i] += a;
      value_sq[i] += b * a;
      y[i % kProjectionDims] += Sign(i) * a;
    }
    for (int i = 0; i < kProjectionEntries; ++i) {
      projected[i] += y[i / kProjectionDims] * y[i % kProjectionDims];
    }
  }
  return {RowSums({static_cast<float>(max), static_cast<float>(sum), static_cast<float>(sum_sq),
                   static_cast<float>(sum_sq_norm)},
                  static_cast<int64_t>(tokens.size())),
          {value.begin(), value.end()},
          {value_sq.begin(), value_sq.end()},
          {projected.begin(), projected.end()}};
}

std::vector<uint32_t> Range(uint32_t from, uint32_t to) {
  std::vector<uint32_t> tokens(to - from);
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

TailTerms Terms() {
  TailTerms terms{};
  terms.tail = Tail::kStratified;
  terms.z = 1.6;
  terms.one_sided_z = 1.3;
  return terms;
}

TEST(EstimateHead, MatchesTwoPassMoments) {
  const Rows rows = RandomRows(1000, 48, 5);
  const std::vector<uint32_t> exact = Range(0, 40);
  const std::vector<reference::SampledTokens> samples = {
      {60, Range(40, 100)}, {300, Range(100, 150)}, {4000, Range(400, 600)}};
  const Sums kept = SumRows(rows, exact);
  const std::vector<float> signs = Signs(48);
  std::vector<Sums> sums;
  for (const auto& s : samples) sums.push_back(SumRows(rows, s.tokens));
  std::vector<StratumSums> strata;
  for (size_t h = 0; h < samples.size(); ++h) {
    strata.push_back(sums[h].Stratum(samples[h].token_count));
  }
  const HeadEstimate got = EstimateHead(kept.sums, kept.value, strata, signs);
  const reference::Estimate want = reference::EstimateOutput(
      rows.kv, rows.logits, exact, samples, std::vector<double>(signs.begin(), signs.end()));
  const auto near = [](double a, double b) { EXPECT_NEAR(a, b, 1e-4 * std::fabs(b)); };
  near(got.max, want.max);
  near(got.denominator, want.denominator);
  near(got.exact_denominator, want.exact_denominator);
  near(got.norm_sq, reference::Dot(want.numerator, want.numerator));
  near(got.norm_sq_unbiased, want.norm_sq_unbiased);
  near(got.variance, want.variance);
  for (int i = 0; i < rows.kv.d; ++i) {
    EXPECT_NEAR(got.numerator[i], want.numerator[i], 1e-4 * std::sqrt(got.norm_sq));
  }
  for (size_t h = 0; h < strata.size(); ++h) {
    near(got.spreads[h].variance_x, want.moments[h].variance_x);
    near(got.spreads[h].trace_n, want.moments[h].trace_n);
    near(got.spreads[h].trace_o, want.moments[h].trace_o);
  }
  near(got.degrees, want.degrees);
  EXPECT_GT(want.degrees, 2);  // not at a limit
  EXPECT_LT(want.degrees, 15);
}

// A sink logit counts as one more exact row, whose value is 0; here from far below the rows'
// log-sum-exp, which is about 10, to far above it.
TEST(EstimateHead, ASinkLogitIsAnExactRowWithoutValue) {
  Rows rows = RandomRows(1000, 48, 5);
  const std::vector<reference::SampledTokens> samples = {
      {60, Range(40, 100)}, {300, Range(100, 150)}, {4000, Range(400, 600)}};
  const Sums kept = SumRows(rows, Range(0, 40));
  const std::vector<float> signs = Signs(48);
  std::vector<Sums> sums;
  for (const auto& s : samples) sums.push_back(SumRows(rows, s.tokens));
  std::vector<StratumSums> strata;
  for (size_t h = 0; h < samples.size(); ++h) {
    strata.push_back(sums[h].Stratum(samples[h].token_count));
  }
  std::vector<uint32_t> exact = Range(0, 40);
  exact.push_back(1000);
  rows.kv = reference::WithSinkRow(rows.kv);
  for (const double sink : {-3.0, 8.0, 12.0, 40.0}) {
    rows.logits.resize(1000);
    rows.logits.push_back(sink);
    const HeadEstimate got = EstimateHead(kept.sums, kept.value, strata, signs, {}, sink);
    const reference::Estimate want = reference::EstimateOutput(
        rows.kv, rows.logits, exact, samples, std::vector<double>(signs.begin(), signs.end()));
    const auto near = [](double a, double b) { EXPECT_NEAR(a, b, 1e-4 * std::fabs(b)); };
    near(got.max, want.max);
    near(got.denominator, want.denominator);
    near(got.exact_denominator, want.exact_denominator);
    near(got.norm_sq_unbiased, want.norm_sq_unbiased);
    near(got.variance, want.variance);
    near(got.degrees, want.degrees);
    for (size_t h = 0; h < strata.size(); ++h) {
      near(got.spreads[h].variance_x, want.moments[h].variance_x);
      near(got.spreads[h].trace_o, want.moments[h].trace_o);
    }
    // However small the output is, the values of its rows are not: a promise is possible.
    TailTerms promising = Terms();
    promising.may_promise = true;
    promising.epsilon = 1;
    const HeadCertificate c = Certify(promising, false, true, 310, 4360, got);
    EXPECT_EQ(c.promise, Promise::kStatistical) << sink;
    EXPECT_NEAR(c.tail_mass, 1 - want.exact_denominator / want.denominator, 1e-5);
  }
}

// The weight of the rows decides whether an output is too small for a promise.
TEST(EstimateHead, RowsThatCancelPromiseNothingWithASinkLogitEither) {
  Rows rows = RandomRows(1000, 48, 5);
  for (double& v : rows.kv.v) v /= 100;
  const Sums kept = SumRows(rows, Range(0, 40)), drawn = SumRows(rows, Range(40, 240));
  TailTerms promising = Terms();
  promising.may_promise = true;
  promising.epsilon = 1e6;
  const std::vector<StratumSums> strata = {drawn.Stratum(960)};
  for (const double sink : {-3.0, 12.0}) {
    const HeadEstimate head = EstimateHead(kept.sums, kept.value, strata, Signs(48), {}, sink);
    EXPECT_EQ(Certify(promising, false, true, 200, 960, head).promise, Promise::kNone);
  }
}

// Codes of all rows from `first` on: x^ is x times exp(bias) and noise, v^ is v with noise.
reference::CodeTerms NoisyCodes(const Rows& rows, uint32_t first, double bias, double noise) {
  std::mt19937_64 random(77);
  std::normal_distribution<double> normal;
  reference::CodeTerms codes;
  codes.reference = 1.5;
  codes.weights.assign(rows.kv.n, 0.0);
  codes.values.resize(rows.kv.n);
  for (auto t = static_cast<int64_t>(first); t < rows.kv.n; ++t) {
    codes.weights[t] = std::exp(rows.logits[t] - codes.reference + bias + noise * normal(random));
    for (const double v : rows.kv.Value(t)) {
      codes.values[t].push_back(codes.weights[t] * (v + noise * normal(random)));
    }
  }
  return codes;
}

struct Corrected {
  HeadEstimate got;
  reference::Estimate want;
};
// The estimate from 40 exact rows, the codes of all others, and samples of three strata.
Corrected Correct(const Rows& rows, const reference::CodeTerms& terms) {
  const std::vector<uint32_t> exact = Range(0, 40);
  const std::vector<reference::SampledTokens> samples = {
      {60, Range(40, 90)}, {300, Range(100, 150)}, {600, Range(400, 500)}};
  const Sums kept = SumRows(rows, exact);
  const std::vector<float> signs = Signs(rows.kv.d);
  std::vector<Sums> sums;
  for (const auto& s : samples) sums.push_back(SumRows(rows, s.tokens, &terms));
  std::vector<StratumSums> strata;
  for (size_t h = 0; h < samples.size(); ++h) {
    strata.push_back(sums[h].Stratum(samples[h].token_count));
  }
  const CodeSums codes{terms.reference, terms.sum(), terms.value_sum(rows.kv.d)};
  return {EstimateHead(kept.sums, kept.value, strata, signs, codes),
          reference::EstimateOutput(rows.kv, rows.logits, exact, samples,
                                    std::vector<double>(signs.begin(), signs.end()), &terms)};
}

TEST(EstimateHead, RowsCorrectTheAnswerOfCodes) {
  const Rows rows = RandomRows(1000, 48, 5);
  const auto [got, want] = Correct(rows, NoisyCodes(rows, 40, 0, 0.3));
  EXPECT_FALSE(got.from_codes);
  // Both are in units of an exponential of their own.
  const double unit = std::exp(want.max - got.max);
  const auto near = [](double a, double b) { EXPECT_NEAR(a, b, 1e-4 * std::fabs(b)); };
  near(got.denominator, unit * want.denominator);
  near(got.exact_denominator, unit * want.exact_denominator);
  near(got.norm_sq_unbiased, unit * unit * want.norm_sq_unbiased);
  near(got.variance, unit * unit * want.variance);
  near(got.degrees, want.degrees);
  for (int i = 0; i < rows.kv.d; ++i) {
    EXPECT_NEAR(got.numerator[i], unit * want.numerator[i], 1e-4 * std::sqrt(got.norm_sq));
  }
  for (size_t h = 0; h < 3; ++h) {
    near(got.spreads[h].trace_o, unit * unit * want.moments[h].trace_o);
  }
}

// An answer from all rows still has the rounding of what codes added and rows took away.
TEST(EstimateHead, AllRowsAreExactOnlyIfLittleIsRounded) {
  const Rows rows = RandomRows(1000, 48, 5);
  HeadEstimate head = Correct(rows, NoisyCodes(rows, 40, 0, 0.3)).got;
  // Of 960 tokens, whose x^ are about as large as their x.
  EXPECT_GT(head.rounding, 1e-7);
  EXPECT_LT(head.rounding, 1e-5);
  EXPECT_EQ(Certify(Terms(), false, true, 960, 960, head).promise, Promise::kExact);
  head.rounding = 1.0 / 4000;
  const HeadCertificate certificate = Certify(Terms(), false, true, 960, 960, head);
  EXPECT_EQ(certificate.promise, Promise::kNone);
  EXPECT_EQ(certificate.relative_error, std::numeric_limits<float>::infinity());
}

// A sampled row whose code overestimates it 10,000 times stands for six such rows, of which codes
// have added one: D^ is below 0. Then the answer is that of exact rows and codes.
TEST(EstimateHead, AnswersFromCodesIfTheDenominatorIsUnclear) {
  const Rows rows = RandomRows(1000, 48, 5);
  reference::CodeTerms terms = NoisyCodes(rows, 40, 0, 0.3);
  terms.weights[450] *= 1e4;
  for (double& v : terms.values[450]) v *= 1e4;
  const auto [got, want] = Correct(rows, terms);
  ASSERT_LT(want.denominator, 0);  // what the test is about
  EXPECT_TRUE(got.from_codes);
  std::vector<double> numerator = terms.value_sum(48);
  double denominator = terms.sum();
  for (uint32_t t = 0; t < 40; ++t) {
    const double x = std::exp(rows.logits[t] - terms.reference);
    denominator += x;
    for (int i = 0; i < 48; ++i) numerator[i] += x * rows.kv.Value(t)[i];
  }
  for (int i = 0; i < 48; ++i) {
    EXPECT_NEAR(got.numerator[i] / got.denominator, numerator[i] / denominator, 1e-5);
  }
  TailTerms promising = Terms();
  promising.may_promise = true;
  promising.epsilon = 1e6;
  const HeadCertificate certificate = Certify(promising, false, true, 200, 960, got);
  EXPECT_EQ(certificate.promise, Promise::kNone);
  EXPECT_EQ(certificate.relative_error, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(WantsSecondDraw(promising, true, certificate));
  EXPECT_TRUE(WantsSecondDraw(promising, false, certificate));
  // Even if every row is drawn.
  EXPECT_EQ(Certify(promising, false, true, 960, 960, got).promise, Promise::kNone);
}

TEST(EstimateHead, KnowsAllWhenEveryRowIsDrawn) {
  const Rows rows = RandomRows(100, 16, 6);
  const Sums kept = SumRows(rows, Range(0, 10));
  const Sums drawn = SumRows(rows, Range(10, 100));
  const std::vector<StratumSums> strata = {drawn.Stratum(90)};
  const HeadEstimate e = EstimateHead(kept.sums, kept.value, strata, Signs(16));
  EXPECT_EQ(e.variance, 0);
  EXPECT_EQ(RelativeError(Terms(), e), 0);
  EXPECT_NEAR(e.norm_sq_unbiased, e.norm_sq, 1e-9 * e.norm_sq);
}

TEST(EstimateHead, OneRowOfManySaysNothingAboutTheVariance) {
  const Rows rows = RandomRows(100, 16, 7);
  const Sums kept = SumRows(rows, Range(0, 10));
  const Sums drawn = SumRows(rows, Range(10, 11));
  std::vector<StratumSums> strata = {drawn.Stratum(90)};
  EXPECT_EQ(RelativeError(Terms(), EstimateHead(kept.sums, kept.value, strata, Signs(16))),
            std::numeric_limits<double>::infinity());
  strata[0].token_count = 1;
  EXPECT_EQ(RelativeError(Terms(), EstimateHead(kept.sums, kept.value, strata, Signs(16))), 0);
}

TEST(EstimateHead, AStratumFarAboveTheExactRowsSetsTheReference) {
  Rows rows = RandomRows(100, 16, 8);
  for (int t = 10; t < 100; ++t) rows.logits[t] += 300;
  const Sums kept = SumRows(rows, Range(0, 10));
  const Sums drawn = SumRows(rows, Range(10, 60));
  const std::vector<StratumSums> strata = {drawn.Stratum(90)};
  const HeadEstimate e = EstimateHead(kept.sums, kept.value, strata, Signs(16));
  EXPECT_EQ(e.max, drawn.sums.max);
  EXPECT_LT(e.exact_denominator / e.denominator, 1e-100);
  EXPECT_TRUE(std::isfinite(RelativeError(Terms(), e)));
}

// Strata that are read whole have no error, and a single row says nothing about the
// error. If one row causes all of an error, the error has one direction.
TEST(EstimateHead, DegreesAreOfTheSampledRowsAlone) {
  Rows rows = RandomRows(200, 32, 10);
  for (double& l : rows.logits) l /= 4;
  const Sums kept = SumRows(rows, Range(0, 10));
  const Sums whole = SumRows(rows, Range(10, 60)), sample = SumRows(rows, Range(60, 120));
  const std::vector<float> signs = Signs(32);
  const std::vector<double> wide(signs.begin(), signs.end());
  const HeadEstimate e =
      EstimateHead(kept.sums, kept.value,
                   std::vector<StratumSums>{whole.Stratum(50), sample.Stratum(400)}, signs);
  const std::vector<reference::SampledTokens> samples = {{50, Range(10, 60)},
                                                         {400, Range(60, 120)}};
  const reference::Estimate want =
      reference::EstimateOutput(rows.kv, rows.logits, Range(0, 10), samples, wide);
  EXPECT_NEAR(e.degrees, want.degrees, 1e-3 * want.degrees);
  EXPECT_GT(e.degrees, 2);
  EXPECT_EQ(EstimateHead(kept.sums, kept.value, std::vector<StratumSums>{whole.Stratum(50)}, signs)
                .degrees,
            1);
  EXPECT_EQ(EstimateHead(kept.sums, kept.value, {}, signs).degrees, 1);
  const Sums one = SumRows(rows, Range(60, 61));
  EXPECT_EQ(
      EstimateHead(kept.sums, kept.value, std::vector<StratumSums>{one.Stratum(50)}, signs).degrees,
      1);
  rows.logits[70] += 30;
  const Sums dominated = SumRows(rows, Range(60, 120));
  EXPECT_NEAR(
      EstimateHead(kept.sums, kept.value, std::vector<StratumSums>{dominated.Stratum(400)}, signs)
          .degrees,
      1, 0.05);
}

TEST(EstimateHead, NoExactRows) {
  const Rows rows = RandomRows(100, 16, 9);
  const Sums drawn = SumRows(rows, Range(0, 50));
  const std::vector<StratumSums> strata = {drawn.Stratum(100)};
  const HeadEstimate e = EstimateHead(RowSums(), std::vector<float>(16, 0.0f), strata, Signs(16));
  EXPECT_EQ(e.exact_denominator, 0);
  EXPECT_NEAR(e.denominator, 2 * drawn.sums.sum, 1e-3);
}

}  // namespace
}  // namespace spillway
