#include "host/core/head_estimate.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace spillway {
namespace {

using Projected = std::array<double, kProjectionDims>;

// y_m = sum of +-v_i over i = m, m + 16, ...; see host/core/degrees.h.
template <typename Vector>
Projected Project(const Vector& v, std::span<const float> signs) {
  Projected y{};
  for (size_t i = 0; i < signs.size(); i += kProjectionDims) {
    for (int m = 0; m < kProjectionDims; ++m) y[m] += double{signs[i + m]} * v[i + m];
  }
  return y;
}

// Degrees of freedom of the estimate's error.
double ErrorDegrees(const HeadEstimate& e, std::span<const StratumSums> strata,
                    std::span<const float> signs) {
  std::vector<double> output(signs.size());
  for (size_t i = 0; i < output.size(); ++i) output[i] = e.numerator[i] / e.denominator;
  const Projected o = Project(output, signs);
  std::array<double, kProjectionEntries> covariance{};  // S'
  for (const StratumSums& s : strata) {
    const int64_t rows = s.sums.count;
    if (rows < 2 || rows >= s.token_count) continue;
    const double f = std::exp(s.sums.max - e.max);
    const Projected xy = Project(s.value, signs);
    const Projected xxy = Project(s.value_sq, signs);
    Projected deviation;
    for (int a = 0; a < kProjectionDims; ++a) deviation[a] = f * (xy[a] - o[a] * s.sums.sum);
    const double r = static_cast<double>(rows);
    const double factor = SpreadFactor(rows, s.token_count) / (r - 1);
    for (int a = 0; a < kProjectionDims; ++a) {
      for (int b = 0; b < kProjectionDims; ++b) {
        const ProjectedSums sums{f * f * s.projected[a * kProjectionDims + b],
                                 f * f * xxy[a],
                                 f * f * xxy[b],
                                 f * f * s.sums.sum_sq,
                                 deviation[a],
                                 deviation[b]};
        covariance[a * kProjectionDims + b] += factor * ProjectedSpread(sums, o[a], o[b], r);
      }
    }
  }
  double trace = 0, square = 0;
  for (int a = 0; a < kProjectionDims; ++a) {
    trace += covariance[a * kProjectionDims + a];
  }
  for (const double entry : covariance) square += entry * entry;
  return DegreesOfFreedom(static_cast<int>(signs.size()), e.variance, trace, square);
}

// Sums of x and x v over exact rows and codes, in units of exp(e.max). sink: the sink logit's part
// of D^, in the same units.
void AddKnown(const RowSums& exact, std::span<const float> exact_value, const CodeSums& codes,
              double sink, HeadEstimate& e) {
  e.row_denominator = 0;
  e.numerator.assign(exact_value.size(), 0.0);
  if (exact.count > 0) {
    const double f = std::exp(exact.max - e.max);
    e.row_denominator = f * exact.sum;
    for (size_t i = 0; i < e.numerator.size(); ++i) e.numerator[i] = f * exact_value[i];
  }
  e.exact_denominator = e.row_denominator + sink;
  if (!(codes.sum > 0)) return;
  const double f = std::exp(codes.reference - e.max);
  e.row_denominator += f * codes.sum;
  for (size_t i = 0; i < e.numerator.size(); ++i) e.numerator[i] += f * codes.value[i];
}

void AddStrata(std::span<const StratumSums> strata, HeadEstimate& e) {
  for (const StratumSums& s : strata) {
    if (s.sums.count == 0) continue;
    const double f = std::exp(s.sums.max - e.max) * StratumRate(s.sums.count, s.token_count);
    e.row_denominator += f * s.sums.sum;
    for (size_t i = 0; i < e.numerator.size(); ++i) e.numerator[i] += f * s.value[i];
  }
}

// Fills the spreads of the strata from their rows. output: o.
void AddSpreads(std::span<const StratumSums> strata, std::span<const double> output,
                HeadEstimate& e) {
  double o_norm_sq = 0;
  for (const double o : output) o_norm_sq += o * o;
  for (const StratumSums& s : strata) {
    const double f = std::exp(s.sums.max - e.max);
    StratumMoments m{.sum_x = f * s.sums.sum,
                     .sum_xx = f * f * s.sums.sum_sq,
                     .sum_xxvv = f * f * s.sums.sum_sq_norm,
                     .sum_xv_sq = 0,
                     .sum_xvo_sq = 0,
                     .o_dot_sum_xxv = 0};
    for (size_t i = 0; i < output.size(); ++i) {
      const double sum_xv = f * s.value[i];
      const double sum_xvo = sum_xv - output[i] * m.sum_x;
      m.sum_xv_sq += sum_xv * sum_xv;
      m.sum_xvo_sq += sum_xvo * sum_xvo;
      m.o_dot_sum_xxv += output[i] * (f * f * s.value_sq[i]);
    }
    e.spreads.push_back(SpreadOf(s.sums.count, s.token_count, m, o_norm_sq));
  }
}

// Variance of D^.
double DenominatorVariance(std::span<const StratumSums> strata, double max) {
  SampleVariance variance;
  for (const StratumSums& s : strata) {
    const double f = std::exp(s.sums.max - max);
    const StratumMoments m{.sum_x = f * s.sums.sum,
                           .sum_xx = f * f * s.sums.sum_sq,
                           .sum_xxvv = 0,
                           .sum_xv_sq = 0,
                           .sum_xvo_sq = 0,
                           .o_dot_sum_xxv = 0};
    variance.Add(s.sums.count, s.token_count, SpreadOf(s.sums.count, s.token_count, m, 0));
  }
  return variance.of_denominator;
}

}  // namespace

double CodeSums::MeanSquareFrom(std::span<const double> output) const {
  if (!(sum > 0)) return 0;
  double product = 0, square = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    product += centre[i] * output[i];
    square += output[i] * output[i];
  }
  return std::max((centre_square - 2 * product) / sum + square, 0.0);
}

HeadEstimate EstimateHead(const RowSums& exact, std::span<const float> exact_value,
                          std::span<const StratumSums> strata, std::span<const float> signs,
                          const CodeSums& codes, double sink) {
  const size_t d = exact_value.size();
  HeadEstimate e{};
  e.max = std::max<double>(exact.max, sink);
  for (const StratumSums& s : strata) e.max = std::max<double>(e.max, s.sums.max);
  if (codes.sum > 0) e.max = std::max(e.max, codes.reference);
  const double sink_part = std::exp(sink - e.max);
  AddKnown(exact, exact_value, codes, sink_part, e);
  AddStrata(strata, e);
  e.denominator = e.row_denominator + sink_part;
  // Sums of fp32 are off by their rounding too.
  const double rounding =
      codes.sum > 0 ? std::exp(codes.reference - e.max) * codes.sum * 0x1p-20 : 0;
  if (!codes.value.empty() &&
      !IsClearlyPositive(e.denominator, DenominatorVariance(strata, e.max) + rounding * rounding)) {
    e.from_codes = true;
    AddKnown(exact, exact_value, codes, sink_part, e);
    e.denominator = e.row_denominator + sink_part;
  }
  e.rounding = rounding > 0 ? rounding / e.denominator : 0;
  for (const double v : e.numerator) e.norm_sq += v * v;
  std::vector<double> output(d);
  for (size_t i = 0; i < d; ++i) output[i] = e.numerator[i] / e.denominator;
  AddSpreads(strata, output, e);
  if (!codes.predicted.empty()) {
    const double unit = std::exp(codes.reference - e.max);
    const double centre_square = codes.MeanSquareFrom(output);
    for (size_t h = 0; h < strata.size(); ++h) {
      e.spreads[h].trace_o = WithPrediction(
          strata[h].sums.count, e.spreads[h].trace_o,
          codes.sum > 0 ? unit * unit * codes.predicted[h].Variance(centre_square) : 0.0);
    }
  }
  SampleVariance variance;
  bool drawn = false;
  for (size_t h = 0; h < strata.size(); ++h) {
    variance.Add(strata[h].sums.count, strata[h].token_count, e.spreads[h]);
    drawn |= strata[h].sums.count > 0;
  }
  e.variance = variance.of_output;
  if (drawn) {
    e.degrees = ErrorDegrees(e, strata, signs);
  } else {
    e.degrees = codes.predicted.empty() ? 1 : kPredictedDegrees;
  }
  e.norm_sq_unbiased = UnbiasedNormSq(e.norm_sq, variance.of_numerator);
  return e;
}

}  // namespace spillway
