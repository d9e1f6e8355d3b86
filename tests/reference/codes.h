#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tests/reference/attention.h"

namespace spillway::reference {

// The mean of the first 1,024 keys.
std::vector<double> KeyCentre(const KeyValues& kv);

// P x with P [d][d] row-major.
std::vector<double> Rotated(std::span<const float> rotation, std::span<const double> x);

// The `asymmetric` code of a key. With o = (k - c) / ||k - c||, y = sqrt(d) P o
// and the step of B bits: u_j = clamp(floor(y_j / step) + 2^(B-1), 0, 2^B - 1),
// t_j = (u_j - (2^B - 1) / 2) step, f = ||k - c|| / <P o, t>, rounded to
// bfloat16; 0 if k = c or <P o, t> <= 0.
struct RotationCode {
  std::vector<int> levels;  // u, [d]
  double factor = 0;        // f
  // The smallest distance of a coordinate y_j to the border between two levels.
  double border_distance = 0;
  // The distance of f, before rounding, to the nearest number that rounds to another result, as a
  // fraction of f.
  double factor_margin = 0;
};
double QuantiserStep(int bits);
RotationCode EncodeRotated(std::span<const double> key, std::span<const double> centre,
                           std::span<const float> rotation, int bits);

// The 4-bit form of a rotated query: s = max|Pq| / 7.5,
// w = clamp(rne(Pq / s - 1/2), -8, 7), standing for (w + 1/2) s.
struct QuantisedQuery {
  std::vector<int> levels;     // w, [d]
  double step = 0;             // s
  double norm_sq = 0;          // ||P q||^2
  double error_sq = 0;         // squared error of this form against P q; 0 for a query of zeros
  double border_distance = 0;  // smallest distance of Pq / s to a border
};
QuantisedQuery QuantiseQuery(std::span<const double> q, std::span<const float> rotation);

// sum_j (2 w_j + 1) (2 u_j - (2^B - 1)): four times the scalar product of the codes, in units of
// s * step.
int64_t IntegerProduct(std::span<const int> key_levels, std::span<const int> query_levels,
                       int bits);

// scale * f * <t, quantised P q>: the estimated logit without the centre's part.
double AsymmetricLogit(const RotationCode& key, const QuantisedQuery& query, int bits,
                       double scale);

// The error of a query head's estimates: the mean over tokens, weighted by their estimated softmax
// weights, of
//   scale^2 f^2 (1 - D)^2 (D / (1 - D) ||P q||^2 + error_sq),
// where D is the distortion of the codes' quantiser. codes, logits: those of the tokens in the
// mean.
double RankVariance(std::span<const RotationCode> codes, std::span<const double> logits,
                    const QuantisedQuery& query, int bits, double scale);

}  // namespace spillway::reference
