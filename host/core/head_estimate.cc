#include "host/core/head_estimate.h"

#include <algorithm>
#include <cmath>

namespace spillway {

HeadEstimate EstimateHead(const RowSums& exact, std::span<const float> exact_value,
                          std::span<const StratumSums> strata) {
  const size_t d = exact_value.size();
  HeadEstimate e{};
  e.max = exact.max;
  for (const StratumSums& s : strata) e.max = std::max<double>(e.max, s.sums.max);
  e.numerator.assign(d, 0.0);
  if (exact.count > 0) {
    const double f = std::exp(exact.max - e.max);
    e.exact_denominator = f * exact.sum;
    for (size_t i = 0; i < d; ++i) e.numerator[i] = f * exact_value[i];
  }
  e.denominator = e.exact_denominator;
  for (const StratumSums& s : strata) {
    if (s.sums.count == 0) continue;
    const double f = std::exp(s.sums.max - e.max) * StratumRate(s.sums.count, s.token_count);
    e.denominator += f * s.sums.sum;
    for (size_t i = 0; i < d; ++i) e.numerator[i] += f * s.value[i];
  }
  for (const double v : e.numerator) e.norm_sq += v * v;
  const double o_norm_sq = e.norm_sq / (e.denominator * e.denominator);
  SampleVariance variance;
  for (const StratumSums& s : strata) {
    const double f = std::exp(s.sums.max - e.max);
    StratumMoments m{.sum_x = f * s.sums.sum,
                     .sum_xx = f * f * s.sums.sum_sq,
                     .sum_xxvv = f * f * s.sums.sum_sq_norm,
                     .sum_xv_sq = 0,
                     .sum_xvo_sq = 0,
                     .o_dot_sum_xxv = 0};
    for (size_t i = 0; i < d; ++i) {
      const double o = e.numerator[i] / e.denominator;
      const double sum_xv = f * s.value[i];
      const double sum_xvo = sum_xv - o * m.sum_x;
      m.sum_xv_sq += sum_xv * sum_xv;
      m.sum_xvo_sq += sum_xvo * sum_xvo;
      m.o_dot_sum_xxv += o * (f * f * s.value_sq[i]);
    }
    e.spreads.push_back(SpreadOf(s.sums.count, s.token_count, m, o_norm_sq));
    variance.Add(s.sums.count, s.token_count, e.spreads.back());
  }
  e.variance = variance.of_output;
  e.norm_sq_unbiased = UnbiasedNormSq(e.norm_sq, variance.of_numerator);
  return e;
}

}  // namespace spillway
