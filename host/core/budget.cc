#include "host/core/budget.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/core/normal.h"

namespace spillway {

double UniformBudget(Bound bound, const UniformTail& tail, double epsilon, double delta) {
  const double n = tail.token_count;
  const auto ratio = [](double a, double b) {
    return a == 0 ? 0.0 : b > 0 ? a / b : std::numeric_limits<double>::infinity();
  };
  double root = 0;
  switch (bound) {
    case Bound::kDenominator:
      root = ratio(NormalQuantile(1 - delta / 2) * n * tail.sigma, epsilon * tail.denominator);
      break;
    case Bound::kPaper: {
      const double z = NormalQuantile(1 - delta / 4);
      root = 2 *
             (ratio(z * n * std::sqrt(tail.trace_n), tail.norm_n) +
              ratio(z * n * tail.sigma, tail.denominator)) /
             epsilon;
      break;
    }
    case Bound::kRatio:
      root =
          ratio(NormalQuantile(1 - delta / 2) * n * std::sqrt(tail.trace_o), epsilon * tail.norm_n);
      break;
  }
  return root * root;
}

int64_t FinitePopulation(double budget, int64_t population, int64_t floor) {
  const int64_t low = std::min(floor, population);
  if (!(budget < std::numeric_limits<double>::infinity())) return population;
  const double n = static_cast<double>(population);
  const double b = std::ceil(budget / (1 + budget / n));
  if (!(b < n)) return population;
  return std::max(low, static_cast<int64_t>(b));
}

}  // namespace spillway
