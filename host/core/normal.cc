#include "host/core/normal.h"

#include <cmath>
#include <numbers>

namespace spillway {

double NormalQuantile(double p) {
  // Halley iterations, which converge cubically, from a start near the tail's asymptote. A few
  // iterations reach double precision for every p that a policy can have.
  const double q = p < 0.5 ? p : 1 - p;
  double x = -std::sqrt(-2 * std::log(q)) + 0.8;  // left half
  for (int i = 0; i < 60; ++i) {
    const double phi = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    const double error = 0.5 * std::erfc(-x / std::numbers::sqrt2) - q;
    const double u = error / phi;
    const double step = u / (1 + 0.5 * x * u);
    x -= step;
    if (std::fabs(step) < 1e-13 * (1 + std::fabs(x))) break;
  }
  return p < 0.5 ? x : -x;
}

}  // namespace spillway
