#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spillway {

// Sums over rows with logits s_i, x_i = exp(s_i - max): a softmax numerator
// and denominator, with the second moments that a sampled stratum needs. The
// empty state has max = -infinity and zero sums. All accumulators fp32.
struct RowSums {
  float max = 0;
  float sum = 0;          // sum x
  float sum_sq = 0;       // sum x^2           (moments only)
  float sum_sq_norm = 0;  // sum x^2 ||v||^2   (moments only)
  int64_t count = 0;
};

// A sampled stratum of the tail, for one query head.
struct SampledStratum {
  int64_t token_count = 0;          // n_h
  RowSums sums;                     // of the r_h = sums.count rows drawn
  std::span<const float> value;     // [d] sum x v
  std::span<const float> value_sq;  // [d] sum x^2 v
};

// What I_f and the strata's samples say about one query head's output.
struct HeadEstimate {
  double max = 0;                  // common reference M of what follows
  double denominator = 0;          // D^
  double exact_denominator = 0;    // the part of it from I_f
  double norm_sq = 0;              // ||N^||^2
  double norm_sq_unbiased = 0;     // less its own sampling variance, >= 0
  std::vector<double> numerator;   // [d] N^
  std::vector<double> trace_o;     // per stratum Tr Cov[x (v - o)], m-1 divisor
  std::vector<double> trace_n;     // per stratum Tr Cov[x v]
  std::vector<double> variance_x;  // per stratum Var[x]
  // sum n_h^2 (1/r_h - 1/n_h) trace_o: variance of N^ - o D^.
  double variance = 0;
};

// exact: sums over I_f with exact_value = sum x v, [d]. A stratum with r_h =
// n_h has no variance; one with r_h = 1 < n_h has none that is known and
// gives infinity.
HeadEstimate EstimateHead(const RowSums& exact, std::span<const float> exact_value,
                          std::span<const SampledStratum> strata);

// Relative error at confidence 1 - delta: z sqrt(variance) / ||N|| with the
// unbiased norm; 0 without variance, infinity when the norm vanishes under it.
double RelativeError(const HeadEstimate& estimate, double z);

}  // namespace spillway
