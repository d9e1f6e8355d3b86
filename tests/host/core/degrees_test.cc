#include "host/core/degrees.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/reference/tail.h"

namespace spillway {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kDims = 16;

// A covariance, as the vectors whose outer products add up to it.
using Directions = std::vector<std::vector<double>>;

// The degrees of freedom nu of a covariance, as estimated from its projection by the signs.
double ProjectedDegrees(const Directions& directions, const ProjectionSigns& signs) {
  double trace = 0, square = 0, projected_trace = 0;
  std::vector<double> covariance(kDims * kDims, 0.0);
  for (const std::vector<double>& x : directions) {
    std::vector<double> y(kDims, 0.0);
    for (size_t i = 0; i < x.size(); ++i) {
      trace += x[i] * x[i];
      y[i % kDims] += signs.Of(static_cast<int>(i), x[i]);
    }
    for (int a = 0; a < kDims; ++a) {
      for (int b = 0; b < kDims; ++b) covariance[a * kDims + b] += y[a] * y[b];
    }
  }
  for (int a = 0; a < kDims; ++a) projected_trace += covariance[a * kDims + a];
  for (const double entry : covariance) square += entry * entry;
  const auto d = static_cast<int>(directions[0].size());
  return DegreesOfFreedom(d, trace, projected_trace, square);
}

std::vector<double> Axis(int d, int i, double size = 1) {
  std::vector<double> x(d, 0.0);
  x[i] = size;
  return x;
}

TEST(DegreesOfFreedom, OneDirectionIsOne) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<double> x(80);
    for (double& e : x) e = normal(random);
    EXPECT_NEAR(ProjectedDegrees({x}, ProjectionSigns::Of(seed)), 1, 1e-9) << seed;
  }
}

// Of 64 dimensions, each is added to 3 of the 63 others: the projection shows 1 / nu as
// 1 / nu + (1 - 1 / nu) / 21. This corrects for it.
double Corrected(double seen) { return 1 / ((1 / seen - 1.0 / 21) / (1 - 1.0 / 21)); }

// Independent errors of equal size along all axes: as many directions as dimensions, of which at
// most 64 count.
TEST(DegreesOfFreedom, AllDirectionsAreDimensions) {
  for (const auto& [d, degrees] : {std::pair(16, 16), std::pair(32, 32), std::pair(48, 48),
                                   std::pair(64, 64), std::pair(128, 64), std::pair(256, 64)}) {
    Directions axes;
    for (int i = 0; i < d; ++i) axes.push_back(Axis(d, i, 0.3));
    EXPECT_NEAR(ProjectedDegrees(axes, ProjectionSigns::Of(d)), degrees, 1e-9 * degrees) << d;
  }
}

// Errors of equal size whose axes are turned at random: the same degrees for any signs.
TEST(DegreesOfFreedom, TurningDoesNotMatter) {
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  for (const int d : {16, 32, 64}) {
    Directions axes;
    for (int i = 0; i < d; ++i) {
      std::vector<double> x(d);
      for (double& e : x) e = normal(random);
      for (const std::vector<double>& axis : axes) {
        const double along = reference::Dot(x, axis);
        for (int j = 0; j < d; ++j) x[j] -= along * axis[j];
      }
      const double length = reference::Norm(x);
      for (double& e : x) e /= length;
      axes.push_back(x);
    }
    EXPECT_NEAR(ProjectedDegrees(axes, ProjectionSigns::Of(3)), d, 1e-6) << d;
  }
}

// Axes that are projected to different numbers do not mix, so the estimate is exact.
TEST(DegreesOfFreedom, IsExactWhereTheProjectionSeparates) {
  for (const std::vector<double>& sizes :
       {std::vector<double>{1}, {1, 1}, {2, 1, 1}, {3, 2, 1, 1, 0.1}, {1, 1, 1, 1, 1, 1, 1, 1}}) {
    Directions directions;
    double trace = 0, square = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      directions.push_back(Axis(64, 17 * static_cast<int>(i) % 64, sizes[i]));
      trace += sizes[i] * sizes[i];
      square += std::pow(sizes[i], 4);
    }
    EXPECT_NEAR(ProjectedDegrees(directions, ProjectionSigns::Of(5)),
                Corrected(trace * trace / square), 1e-9);
  }
}

// For random directions, nu is about their number. It is the mean of 1 / nu that is close.
TEST(DegreesOfFreedom, IsNearTheRankOfRandomDirections) {
  std::mt19937_64 random(4);
  std::normal_distribution<double> normal;
  for (const int rank : {2, 4, 8, 16, 32}) {
    double inverse = 0;
    constexpr int kSeeds = 200;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      Directions directions(rank, std::vector<double>(128));
      for (auto& x : directions) {
        for (double& e : x) e = normal(random);
      }
      const double nu = ProjectedDegrees(directions, ProjectionSigns::Of(seed));
      EXPECT_GE(nu, 1);
      EXPECT_LE(nu, kDegreesMax);
      inverse += 1 / nu / kSeeds;
    }
    // Trace that the projection hides makes nu smaller, which is the safe side.
    EXPECT_GT(1 / inverse, 0.4 * rank) << rank;
    EXPECT_LT(1 / inverse, 1.1 * rank) << rank;
  }
}

// Trace that the projection maps to 0 counts as one more direction.
TEST(DegreesOfFreedom, HiddenTraceIsOneDirection) {
  const ProjectionSigns signs = ProjectionSigns::Of(6);
  // Elements 0 and 16 are added to the same number, with opposite signs.
  std::vector<double> hidden = Axis(64, 0);
  hidden[16] = signs.negative(0) == signs.negative(16) ? -1 : 1;
  EXPECT_EQ(ProjectedDegrees({hidden}, signs), 1);
  // Of a trace of 10, eight axes show 8, and 2 is hidden. The covariance's Frobenius norm is at
  // most that of the visible part, sqrt(8), plus 2 in one hidden direction.
  Directions directions = {hidden};
  for (int i = 1; i <= 8; ++i) directions.push_back(Axis(64, i));
  const double norm = std::sqrt(8.0) + 2;
  EXPECT_NEAR(ProjectedDegrees(directions, signs), Corrected(100 / (norm * norm)), 1e-9);
}

TEST(DegreesOfFreedom, IsOneWhereNothingCanBeSaid) {
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [trace, projected, square] :
       {std::tuple(0.0, 0.0, 0.0), std::tuple(kInf, 1.0, 1.0), std::tuple(1.0, kNan, kNan),
        std::tuple(kInf, kInf, kInf), std::tuple(1.0, kInf, kInf)}) {
    EXPECT_EQ(DegreesOfFreedom(64, trace, projected, square), 1)
        << trace << " " << projected << " " << square;
  }
}

TEST(ProjectionSigns, FollowFromTheSeed) {
  std::set<std::string> seen;
  int negative = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const ProjectionSigns signs = ProjectionSigns::Of(seed), again = ProjectionSigns::Of(seed);
    std::string text;
    for (int i = 0; i < 256; ++i) {
      EXPECT_EQ(signs.negative(i), again.negative(i));
      EXPECT_EQ(signs.negative(i), (signs.words[i / 32] & (1u << (i % 32))) != 0);
      EXPECT_EQ(signs.Of(i, 2.5f), signs.negative(i) ? -2.5f : 2.5f);
      negative += signs.negative(i);
      text += signs.negative(i) ? '-' : '+';
    }
    seen.insert(text);
  }
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_NEAR(negative, 12800, 400);  // 5 standard deviations
}

// The spread of x (y - o) follows from the sums that are kept of x and y.
TEST(ProjectedSpread, IsOfTheRowsAboutTheirMean) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  constexpr int kRows = 9;
  const double o[2] = {0.4, -1.1};
  double x[kRows], y[kRows][2];
  ProjectedSums s{};
  double mean[2] = {};
  for (int r = 0; r < kRows; ++r) {
    x[r] = std::exp(normal(random));
    for (double& e : y[r]) e = normal(random);
    s.xxyy += x[r] * x[r] * y[r][0] * y[r][1];
    s.xxy_a += x[r] * x[r] * y[r][0];
    s.xxy_b += x[r] * x[r] * y[r][1];
    s.xx += x[r] * x[r];
    s.deviation_a += x[r] * (y[r][0] - o[0]);
    s.deviation_b += x[r] * (y[r][1] - o[1]);
    for (int a = 0; a < 2; ++a) mean[a] += x[r] * (y[r][a] - o[a]) / kRows;
  }
  double wanted = 0;
  for (int r = 0; r < kRows; ++r) {
    wanted += (x[r] * (y[r][0] - o[0]) - mean[0]) * (x[r] * (y[r][1] - o[1]) - mean[1]);
  }
  EXPECT_NEAR(ProjectedSpread(s, o[0], o[1], kRows), wanted, 1e-9);
}

// The number that sqrt(sum lambda chi^2 / sum lambda) exceeds with probability delta, simulated.
double SimulatedQuantile(const std::vector<double>& lambda, double delta, uint64_t seed) {
  constexpr int kDraws = 50000;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const double total = std::accumulate(lambda.begin(), lambda.end(), 0.0);
  std::vector<double> squares(kDraws);
  for (double& s : squares) {
    for (const double l : lambda) {
      const double z = normal(random);
      s += l * z * z / total;
    }
  }
  const auto at = squares.begin() + static_cast<int64_t>((1 - delta) * kDraws);
  std::nth_element(squares.begin(), at, squares.end());
  return std::sqrt(*at);
}

double QuantileOf(double degrees, double delta) {
  return ErrorQuantile(degrees, reference::TwoSidedQuantile(2 * delta),
                       reference::TwoSidedQuantile(delta));
}

TEST(ErrorQuantile, IsThatOfEqualDirections) {
  for (const int nu : {1, 2, 4, 10, 50}) {
    for (const double delta : {0.05, 0.1, 0.2}) {
      const double wanted = SimulatedQuantile(std::vector<double>(nu, 1.0), delta, nu);
      // The cube-root approximation is 1.3 % too low for one normal variable, and closer for more.
      const double tolerance = nu == 1 ? 0.018 : 0.012;
      EXPECT_NEAR(QuantileOf(nu, delta), wanted, tolerance * wanted) << nu << " " << delta;
    }
  }
}

// Variances that fall by half have nu = 3, and those that fall by a tenth nu = 19.
TEST(ErrorQuantile, IsNearThatOfUnequalOnes) {
  for (const auto& [ratio, nu] : {std::pair(0.5, 3.0), std::pair(0.9, 19.0)}) {
    std::vector<double> lambda;
    for (double l = 1; l > 1e-3; l *= ratio) lambda.push_back(l);
    for (const double delta : {0.05, 0.1, 0.2}) {
      const double wanted = SimulatedQuantile(lambda, delta, 77);
      EXPECT_NEAR(QuantileOf(nu, delta), wanted, 0.03 * wanted) << nu << " " << delta;
    }
  }
}

TEST(ErrorQuantile, FallsWithDegreesFromTheNormalQuantileToOne) {
  for (const double delta : {0.05, 0.1, 0.2}) {
    double last = kInf;
    for (const double nu : {1.0, 1.2, 2.0, 5.0, 16.0, 100.0, 1e4, 1e12}) {
      const double z = QuantileOf(nu, delta);
      EXPECT_LE(z, reference::TwoSidedQuantile(delta));
      // For delta 0.2, the cube root is lowest at one direction.
      EXPECT_LT(z, 1.005 * last);
      last = z;
    }
    EXPECT_NEAR(last, 1, 1e-5);
  }
  // The quantile is limited to the two-sided one.
  EXPECT_EQ(ErrorQuantile(1, 1.5, 1.6), 1.6);
}

}  // namespace
}  // namespace spillway
