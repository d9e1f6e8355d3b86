#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/policy/policy.h"
#include "tests/reference/attention.h"
#include "tests/reference/value_codes.h"

namespace spillway::reference {

// The z for which the absolute value of a standard normal number exceeds z with probability delta.
double TwoSidedQuantile(double delta);

// What error / sqrt(variance) exceeds with probability delta, for an error with this many degrees
// of freedom: z^2 = (1 - 2 / (9 nu) + z1 sqrt(2 / (9 nu)))^3, where a standard normal number
// exceeds z1 with probability delta; at most TwoSidedQuantile().
double ErrorQuantile(double degrees, double delta);

// Second moments of x = exp(s - M) over rows: two passes, divisor m - 1.
struct Moments {
  double variance_x = 0;  // Var[x]
  double trace_n = 0;     // Tr Cov[x v]
  double trace_o = 0;     // Tr Cov[x (v - o)]
};
// logits: by token; o: [d]. With codes, of x v - x^ v^ and x - x^ in place of x v and x.
Moments TwoPassMoments(const KeyValues& kv, std::span<const double> logits, double max,
                       std::span<const uint32_t> tokens, std::span<const double> o,
                       const CodeTerms* codes = nullptr);

// Rows of one stratum, and the number of its tokens.
struct SampledTokens {
  int64_t token_count = 0;  // n_h
  std::vector<uint32_t> tokens;
};

// What a certificate states: N^ and D^ from exact rows and samples, o^ = N^ / D^, the variance of
// N^ - o D^ by strata, and the squared norm of N^ minus its variance.
struct Estimate {
  double max = 0;
  double denominator = 0;
  double exact_denominator = 0;
  std::vector<double> numerator;
  double variance = 0;
  double norm_sq_unbiased = 0;
  std::vector<Moments> moments;  // per stratum
  // Tr(S)^2 / Tr(S^2) of the error's covariance S, estimated from its projection: the projected
  // values y_m are sums of v_i signs_i over i = m, m + 16, ...
  double degrees = 1;
};
// signs: [d], +1 or -1; if empty, degrees are not computed. codes: if not null, the answer is that
// of the codes, and rows add x v - x^ v^ in place of x v. predicted: the tokens of each stratum
// whose predicted variances count; a stratum's variance is then the larger one of that of its rows,
// and of the mean of it and the prediction, weighted by the rows less one and 8. Empty: rows alone
// count.
Estimate EstimateOutput(const KeyValues& kv, std::span<const double> logits,
                        std::span<const uint32_t> exact, std::span<const SampledTokens> strata,
                        std::span<const double> signs = {}, const CodeTerms* codes = nullptr,
                        std::span<const std::vector<uint32_t>> predicted = {});

// The rows that a bound needs from a tail of one stratum, given its pilot's estimate: the sample
// that it needs with replacement, minus what the finite tail saves, rounded up. Every row if the
// norm is unknown, that is, estimated as 0. Deviations are multiplied by `inflation`.
int64_t UniformRows(Bound bound, const Estimate& pilot, int64_t token_count, double inflation,
                    double epsilon, double delta);
// The rows per stratum, at least `drawn` of each, with the smallest total for which ErrorQuantile()
// sqrt(variance) is epsilon times the norm, rounded up. Every row if the norm is unknown.
std::vector<int64_t> StratifiedRows(const Estimate& pilot, std::span<const SampledTokens> drawn,
                                    double inflation, double epsilon, double delta);

// Tr Var of N^ - o D^ for allotted rows: sum n_h^2 (1/b_h - 1/n_h) T_h^2.
double AllottedVariance(std::span<const double> token_counts, std::span<const double> deviations,
                        std::span<const int64_t> rows);

}  // namespace spillway::reference
