#pragma once

#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"
#include "host/core/keyed_hash.h"

// The number of directions over which a sample's error spreads. The squared error of an output is a
// sum of lambda_j chi^2_1, where lambda_j are the eigenvalues of S, the covariance of N^ - o D^. So
// its quantile, in units of the trace of S, depends on the degrees of freedom
//   nu = Tr(S)^2 / Tr(S^2).
// If one direction (or one row) causes all of the error, nu is 1 and the error is a normal
// variable. If the error spreads over many directions, nu is large and the squared error hardly
// varies.
// S is not computed. Each value vector v is projected to kProjectionDims numbers: y_m is the sum of
// +-v_i over i = m, m + kProjectionDims, ... The covariance S' of the projected values stands for
// S. The part of the trace that the projection may hide counts as one direction.
namespace spillway {

inline constexpr int kProjectionDims = 16;
inline constexpr int kProjectionEntries = kProjectionDims * kProjectionDims;

// Signs of the projection: bit i % 32 of word i / 32 is set if v_i is taken with the opposite sign.
// The signs depend on the policy's seed. So values that cancel in the projection cannot be
// constructed without knowing the seed.
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
  // v_i with the sign that it has in the projection.
  template <typename Real>
  SPILLWAY_HOST_DEVICE Real Of(int i, Real v) const {
    return negative(i) ? -v : v;
  }
};

// Sums over the r rows of one stratum, for one entry (a, b) of its part of S'. o: the projected
// output.
struct ProjectedSums {
  double xxyy;                      // sum x^2 y_a y_b
  double xxy_a, xxy_b;              // sum x^2 y_a, sum x^2 y_b
  double xx;                        // sum x^2
  double deviation_a, deviation_b;  // sum (x y_a - o_a x), sum (x y_b - o_b x)
};
SPILLWAY_HOST_DEVICE inline double ProjectedSpread(const ProjectedSums& s, double o_a, double o_b,
                                                   double rows) {
  return s.xxyy - o_a * s.xxy_b - o_b * s.xxy_a + s.xx * o_a * o_b -
         s.deviation_a * s.deviation_b / rows;
}

// nu of an error of d dimensions. trace: Tr(S). projected_trace: Tr(S'). projected_square: sum of
// the squared entries of S'. The mean over the signs of the squared entries of S' is Tr(S^2) and,
// for each pair of dimensions that are added to the same y_m, their product in Tr(S)^2. A share
//   p = (d / kProjectionDims - 1) / (d - 1)
// of all pairs are, so the projection changes 1 / nu to about
//   1 / nu + p (1 - 1 / nu),
// and this function inverts that. For a single direction 1 / nu = 1 remains 1, and for errors of
// equal size in all dimensions the result is d. The result is in [1, kDegreesMax] and at most d; it
// is 1 if it cannot be computed. REQUIRES: d is a multiple of kProjectionDims.
inline constexpr double kDegreesMax = 64;
SPILLWAY_HOST_DEVICE inline double DegreesOfFreedom(int d, double trace, double projected_trace,
                                                    double projected_square) {
  const double larger = trace > projected_trace ? trace : projected_trace;
  const double hidden = trace > projected_trace ? trace - projected_trace : 0.0;
  const double norm = (::sqrt(projected_square) + hidden) / larger;
  const double pairs = (static_cast<double>(d) / kProjectionDims - 1) / (d - 1);
  const double inverse = (norm * norm - pairs) / (1 - pairs);
  const double most = d < kDegreesMax ? d : kDegreesMax;
  if (inverse < 1 / most) return most;
  return inverse < 1 ? 1 / inverse : 1.0;
}

// The quantile of error / sqrt(trace) that is exceeded with probability delta, from Wilson and
// Hilferty's cube-root approximation of a chi-square variable (PNAS 1931).
//   one_sided  Phi^-1(1 - delta)
//   two_sided  Phi^-1(1 - delta / 2): exact for one degree of freedom, and the upper limit of the
//              result
SPILLWAY_HOST_DEVICE inline double ErrorQuantile(double degrees, double one_sided,
                                                 double two_sided) {
  const double a = 2 / (9 * degrees);
  const double root = 1 - a + one_sided * ::sqrt(a);
  const double z = root > 0 ? root * ::sqrt(root) : 0.0;
  return z < two_sided ? z : two_sided;
}

}  // namespace spillway
