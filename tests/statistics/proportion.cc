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

double ClopperPearsonUpper(int64_t hits, int64_t draws) {
  constexpr double kTail = 0.005;
  // The probability of at most `hits` hits at proportion p.
  const auto at_most_hits = [&](double p) {
    double sum = 0;
    for (int64_t i = 0; i <= hits; ++i) {
      const auto k = static_cast<double>(i), n = static_cast<double>(draws);
      sum += std::exp(std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1) +
                      k * std::log(p) + (n - k) * std::log1p(-p));
    }
    return sum;
  };
  double low = 0, high = 1;
  if (hits >= draws) return high;
  for (int i = 0; i < 60; ++i) {
    const double p = (low + high) / 2;
    (at_most_hits(p) > kTail ? low : high) = p;
  }
  return high;
}

}  // namespace spillway
