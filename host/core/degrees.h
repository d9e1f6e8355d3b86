#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/host_device.h"
#include "host/core/keyed_hash.h"

// How many directions a sample's error has. The squared error of an output is
// a sum of lambda_j chi^2_1, lambda_j the eigenvalues of the covariance S of its
// numerator N^ - o D^, so its quantile in units of the trace depends on
//   nu = Tr(S)^2 / Tr(S^2)
// degrees of freedom: 1 if one direction (or one row) has it all, and then the
// error is a normal variable's; many if it is spread, and then it hardly varies.
// S is not formed. Values are projected to kProjectionDims numbers, y_m the
// sum of +-v_i over i = m, m + kProjectionDims, ...; their covariance S' stands
// for S. What the projection may hide of the trace counts as one direction.
namespace spillway {

inline constexpr int kProjectionDims = 16;
inline constexpr int kProjectionEntries = kProjectionDims * kProjectionDims;

// Signs of the projection: bit i % 32 of word i / 32 is set where v_i is taken
// negatively. By the policy's seed, so that nobody can know them beforehand.
struct ProjectionSigns {
  uint32_t words[8];

  SPILLWAY_HOST_DEVICE static ProjectionSigns Of(uint64_t seed) {
    ProjectionSigns signs{};
    uint64_t state = SplitMix64(seed ^ 0x70726F6A65637431u);
    for (int i = 0; i < 8; i += 2) {
      state = SplitMix64(state);
      signs.words[i] = static_cast<uint32_t>(state);
      signs.words[i + 1] = static_cast<uint32_t>(state >> 32);
    }
    return signs;
  }
  SPILLWAY_HOST_DEVICE bool negative(int i) const { return (words[i / 32] >> (i % 32) & 1) != 0; }
  // v_i as the projection takes it.
  template <typename Real>
  SPILLWAY_HOST_DEVICE Real Of(int i, Real v) const {
    return negative(i) ? -v : v;
  }
};

// An entry of a stratum's part of S', from sums over its r rows: of x^2 y_a y_b,
// of x^2 y_a and x^2 y_b, of x^2, and of x y_a - o_a x and x y_b - o_b x. o: the
// output's projection.
struct ProjectedSums {
  double xxyy;
  double xxy_a, xxy_b;
  double xx;
  double deviation_a, deviation_b;
};
SPILLWAY_HOST_DEVICE inline double ProjectedSpread(const ProjectedSums& s, double o_a, double o_b,
                                                   double rows) {
  return s.xxyy - o_a * s.xxy_b - o_b * s.xxy_a + s.xx * o_a * o_b -
         s.deviation_a * s.deviation_b / rows;
}

// nu of an error with trace Tr(S), from Tr(S') and the sum of squares of the
// entries of S'. In kProjectionDims directions an error in many has the inverse
// 1 / nu + (1 - 1 / nu) / kProjectionDims, about; one in a single direction keeps
// its 1. In [1, kDegreesMax]; 1 where nothing can be said.
inline constexpr double kDegreesMax = 64;
SPILLWAY_HOST_DEVICE inline double DegreesOfFreedom(double trace, double projected_trace,
                                                    double projected_square) {
  const double larger = trace > projected_trace ? trace : projected_trace;
  const double hidden = trace > projected_trace ? trace - projected_trace : 0.0;
  const double norm = (::sqrt(projected_square) + hidden) / larger;
  constexpr double kIsotropic = 1.0 / kProjectionDims;
  const double inverse = (norm * norm - kIsotropic) / (1 - kIsotropic);
  if (inverse < 1 / kDegreesMax) return kDegreesMax;
  return inverse < 1 ? 1 / inverse : 1.0;
}

// Quantile of error / sqrt(trace) that is passed with chance delta, by
// Wilson and Hilferty's cube root of a chi-square variable (PNAS 1931).
// one_sided: Phi^-1(1 - delta); two_sided: Phi^-1(1 - delta / 2), the exact
// answer for one degree, which is never exceeded.
SPILLWAY_HOST_DEVICE inline double ErrorQuantile(double degrees, double one_sided,
                                                 double two_sided) {
  const double a = 2 / (9 * degrees);
  const double root = 1 - a + one_sided * ::sqrt(a);
  const double z = root > 0 ? root * ::sqrt(root) : 0.0;
  return z < two_sided ? z : two_sided;
}

}  // namespace spillway
