#include "host/core/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spillway {

HeadEstimate EstimateHead(const RowSums& exact, std::span<const float> exact_value,
                          std::span<const SampledStratum> strata) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const size_t d = exact_value.size();
  HeadEstimate e;
  e.max = exact.count > 0 ? exact.max : -kInf;
  for (const SampledStratum& s : strata) {
    if (s.sums.count > 0) e.max = std::max<double>(e.max, s.sums.max);
  }
  e.numerator.assign(d, 0.0);
  if (exact.count > 0) {
    const double f = std::exp(exact.max - e.max);
    e.exact_denominator = f * exact.sum;
    for (size_t i = 0; i < d; ++i) e.numerator[i] = f * exact_value[i];
  }
  e.denominator = e.exact_denominator;
  for (const SampledStratum& s : strata) {
    if (s.sums.count == 0) continue;
    const double f = std::exp(s.sums.max - e.max) * static_cast<double>(s.token_count) /
                     static_cast<double>(s.sums.count);
    e.denominator += f * s.sums.sum;
    for (size_t i = 0; i < d; ++i) e.numerator[i] += f * s.value[i];
  }
  for (double v : e.numerator) e.norm_sq += v * v;
  double o_norm_sq = e.norm_sq / (e.denominator * e.denominator);
  double norm_variance = 0;
  for (const SampledStratum& s : strata) {
    const double r = static_cast<double>(s.sums.count);
    const double n = static_cast<double>(s.token_count);
    const double spread = n * n * (1 / r - 1 / n);
    if (s.sums.count < 2) {
      const double unknown = s.sums.count == s.token_count ? 0.0 : kInf;
      e.trace_o.push_back(unknown);
      e.trace_n.push_back(unknown);
      e.variance_x.push_back(unknown);
      if (unknown > 0) e.variance = norm_variance = kInf;
      continue;
    }
    const double f = std::exp(s.sums.max - e.max);
    const double sx = f * s.sums.sum;
    const double sxx = f * f * s.sums.sum_sq;
    const double sxxvv = f * f * s.sums.sum_sq_norm;
    double mean_n_sq = 0;  // ||sum x v||^2
    double mean_o_sq = 0;  // ||sum x (v - o)||^2
    double cross = 0;      // o . sum x^2 v
    for (size_t i = 0; i < d; ++i) {
      const double o = e.numerator[i] / e.denominator;
      const double sxv = f * s.value[i];
      mean_n_sq += sxv * sxv;
      mean_o_sq += (sxv - o * sx) * (sxv - o * sx);
      cross += o * (f * f * s.value_sq[i]);
    }
    // Rounding may leave a little below 0; sums that passed fp32's range are
    // known to say nothing.
    const auto settled = [](double v) { return std::isfinite(v) ? std::max(0.0, v) : kInf; };
    const double trace_n = settled((sxxvv - mean_n_sq / r) / (r - 1));
    const double trace_o = settled((sxxvv - 2 * cross + o_norm_sq * sxx - mean_o_sq / r) / (r - 1));
    e.trace_n.push_back(trace_n);
    e.trace_o.push_back(trace_o);
    e.variance_x.push_back(settled((sxx - sx * sx / r) / (r - 1)));
    if (s.sums.count < s.token_count) {
      e.variance += spread * trace_o;
      norm_variance += spread * trace_n;
    }
  }
  e.norm_sq_unbiased = std::max(0.0, e.norm_sq - norm_variance);  // 0 when unknown
  return e;
}

double RelativeError(const HeadEstimate& e, double z) {
  if (e.variance == 0) return 0;
  if (!(e.norm_sq_unbiased > 0)) return std::numeric_limits<double>::infinity();
  return z * std::sqrt(e.variance / e.norm_sq_unbiased);
}

}  // namespace spillway
