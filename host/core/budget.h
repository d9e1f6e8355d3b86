#pragma once

#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"
#include "host/core/tail.h"

namespace spillway {

// What the pilot sample tells about a uniformly sampled tail, for one query head. All sums are in
// units of x = exp(logit - M), for any common reference M.
struct UniformTail {
  double token_count = 0;  // n_s
  double sigma = 0;        // sqrt(Var[x])
  double trace_n = 0;      // Tr Cov[x v]
  double trace_o = 0;      // Tr Cov[x (v - o)]
  double norm_n = 0;       // ||N||
  double denominator = 0;  // D
};

// The normal quantile that a bound uses: Phi^-1(1 - delta/4) for kPaper, which splits delta over
// two events; otherwise Phi^-1(1 - delta/2).
double BoundQuantile(Bound bound, double delta);

// The sample size that the bound needs, before the finite-population correction. z: the bound's
// quantile. Infinite if ||N|| or D is 0.
//   kDenominator: (z n_s sigma / (eps D))^2 (vAttention, Lemma 4.1 for D alone)
//   kPaper: (2 (A + B) / eps)^2, A = z n_s sqrt(trace_n) / ||N||,
//     B = z n_s sigma / D (Lemmas 4.1 and 4.2)
//   kRatio: (z n_s sqrt(trace_o) / (eps ||N||))^2, the delta method for N/D
SPILLWAY_HOST_DEVICE inline double UniformBudget(Bound bound, const UniformTail& tail,
                                                 double epsilon, double z) {
  const double n = tail.token_count;
  const auto ratio = [](double a, double b) { return a == 0 ? 0.0 : b > 0 ? a / b : HUGE_VAL; };
  double root = 0;
  switch (bound) {
    case Bound::kDenominator:
      root = ratio(z * n * tail.sigma, epsilon * tail.denominator);
      break;
    case Bound::kPaper:
      root = 2 *
             (ratio(z * n * ::sqrt(tail.trace_n), tail.norm_n) +
              ratio(z * n * tail.sigma, tail.denominator)) /
             epsilon;
      break;
    case Bound::kRatio:
      root = ratio(z * n * ::sqrt(tail.trace_o), epsilon * tail.norm_n);
      break;
  }
  return root * root;
}

// Number of rows to draw: b / (1 + b / population), rounded up, in [floor, population].
SPILLWAY_HOST_DEVICE inline int64_t FinitePopulation(double budget, int64_t population,
                                                     int64_t floor) {
  if (!(budget < HUGE_VAL)) return population;
  const double n = static_cast<double>(population);
  const double b = ::ceil(budget / (1 + budget / n));
  if (!(b < n)) return population;
  const int64_t low = floor < population ? floor : population;
  const int64_t rows = static_cast<int64_t>(b);
  return rows < low ? low : rows;
}

}  // namespace spillway
