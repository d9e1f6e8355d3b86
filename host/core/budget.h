#pragma once

#include <cstdint>

#include "host/policy/policy.h"

namespace spillway {

// What a pilot knows of a tail that is sampled uniformly, for one query head.
// Everything is in units of x = exp(logit - M), M any common reference.
struct UniformTail {
  double token_count = 0;  // n_s
  double sigma = 0;        // sqrt(Var[x])
  double trace_n = 0;      // Tr Cov[x v]
  double trace_o = 0;      // Tr Cov[x (v - o)]
  double norm_n = 0;       // ||N||
  double denominator = 0;  // D
};

// Sample size that the bound asks for, before the finite-population
// correction; infinite when ||N|| or D is 0.
//   kDenominator: (z n_s sigma / (eps D))^2, z = Phi^-1(1 - delta/2)
//     (vAttention, Lemma 4.1 for D alone)
//   kPaper: (2 (A + B) / eps)^2, A = z' n_s sqrt(trace_n) / ||N||,
//     B = z' n_s sigma / D, z' = Phi^-1(1 - delta/4) (Lemmas 4.1 and 4.2)
//   kRatio: (z n_s sqrt(trace_o) / (eps ||N||))^2, the delta method for N/D
double UniformBudget(Bound bound, const UniformTail& tail, double epsilon, double delta);

// Rows to draw: b / (1 + b / population), rounded up, in [floor, population].
int64_t FinitePopulation(double budget, int64_t population, int64_t floor);

}  // namespace spillway
