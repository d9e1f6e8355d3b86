#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/reference/page_index.h"

namespace spillway::reference {

// H of host/core/value_code.h as a matrix [d][d], row-major: H x = signs, then Walsh-Hadamard, over
// the largest power of two m <= d entries from the first on and, if m < d, over the last m.
std::vector<double> ValueTransform(int d);

// The code of a value about its page's centre: v^ = centre + factor * direction.
struct ValueCode {
  double factor = 0;              // g, in bfloat16
  std::vector<double> direction;  // H^T t
  std::vector<double> steps;      // y / step: at an integer, a code may be rounded either way
};
ValueCode EncodeValue(std::span<const double> value, std::span<const double> centre,
                      std::span<const double> transform, int bits);

// What the codes of a tail say, for one query head.
struct CodeTerms {
  std::vector<double> weights;              // x^ by token, in units of exp(reference)
  std::vector<std::vector<double>> values;  // x^ v^ by token, [d]
  double reference = 0;                     // nats

  // What codes predict of the variance of x (v - o) - x^ (v^ - o), for o = output; the mean over
  // tokens. For a token, x^^2 times
  // [(e^(s^2) - 1) (||v - c||^2 + m) + e^(s^2) D ||v - c||^2], where s^2 is at most 2, D is the
  // page's distortion, and m the mean of ||c - o||^2 over the tail, weighted by x^.
  double PredictedVariance(std::span<const uint32_t> tokens, std::span<const double> output) const;
  std::vector<double> distances_sq;          // ||v - c||^2 as g says, by token
  std::vector<double> variances;             // s^2
  std::vector<std::vector<double>> centres;  // by page
  // By page: that of the quantiser, or 1 if the page's codes are not summed.
  std::vector<double> distortions;

  double sum() const;
  std::vector<double> value_sum(int d) const;
};

// logits: estimated logits by token, in nats. variances: of their errors. reference: x^ is in units
// of its exponential. tail: whether a token has an x^; the others have 0. summed: by page, whether
// its codes are summed; otherwise v^ is the page's centre. bits: of the values' codes.
CodeTerms TermsOfCodes(const KeyValues& kv, const PageIndex& index, std::span<const double> logits,
                       std::span<const double> variances, double reference,
                       const std::vector<bool>& tail, const std::vector<bool>& summed, int bits);

// x^ of an estimated logit: a power of 2 whose exponent is a multiple of 1/4 in [-47.75, 15.75]; 0
// if it would be less.
double EstimatedWeight(double logit, double variance, double reference);

}  // namespace spillway::reference
