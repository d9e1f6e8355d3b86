#include "tests/statistics/proportion.h"

#include <cmath>

namespace spillway {

Interval WilsonInterval(int64_t hits, int64_t draws) {
  constexpr double kZ = 2.5758293035489;
  const double n = static_cast<double>(draws);
  const double p = static_cast<double>(hits) / n;
  const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return {centre - half, centre + half};
}

}  // namespace spillway
