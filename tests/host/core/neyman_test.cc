#include "host/core/neyman.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/reference/tail.h"

namespace spillway {
namespace {

double Variance(const std::vector<NeymanStratum>& strata, const std::vector<int64_t>& rows) {
  std::vector<double> counts, deviations;
  for (const NeymanStratum& s : strata) {
    counts.push_back(static_cast<double>(s.token_count));
    deviations.push_back(s.deviation);
  }
  return reference::AllottedVariance(counts, deviations, rows);
}

std::vector<int64_t> Allot(const std::vector<NeymanStratum>& strata, double variance) {
  std::vector<int64_t> rows(strata.size(), -7);
  NeymanAllot(strata, variance, rows);
  return rows;
}

int64_t Total(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

// The smallest total of all allotments, between floors and sizes, that meet the variance.
int64_t BruteForce(const std::vector<NeymanStratum>& strata, double variance) {
  std::vector<int64_t> rows;
  for (const NeymanStratum& s : strata) rows.push_back(s.floor);
  int64_t best = std::numeric_limits<int64_t>::max();
  for (;;) {
    if (Variance(strata, rows) <= variance) best = std::min(best, Total(rows));
    size_t h = 0;
    while (h < rows.size() && rows[h] == strata[h].token_count) {
      rows[h] = strata[h].floor;
      ++h;
    }
    if (h == rows.size()) return best;
    ++rows[h];
  }
}

TEST(NeymanAllot, MatchesBruteForceUpToRounding) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int64_t> size(4, 26);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 300; ++round) {
    std::vector<NeymanStratum> strata(3);
    for (NeymanStratum& s : strata) {
      s.token_count = size(random);
      s.floor = 1 + static_cast<int64_t>(unit(random) * 4);
      s.deviation = std::exp(3 * unit(random));
    }
    const double variance = std::exp(10 * unit(random));
    const std::vector<int64_t> rows = Allot(strata, variance);
    for (size_t h = 0; h < strata.size(); ++h) {
      ASSERT_GE(rows[h], strata[h].floor);
      ASSERT_LE(rows[h], strata[h].token_count);
    }
    ASSERT_LE(Variance(strata, rows), variance * (1 + 1e-9)) << "round " << round;
    const int64_t best = BruteForce(strata, variance);
    ASSERT_GE(Total(rows), best);
    // Rows are rounded up once per stratum.
    ASSERT_LE(Total(rows), best + static_cast<int64_t>(strata.size())) << "round " << round;
  }
}

TEST(NeymanAllot, IsProportionalWithoutFloorsAndCaps) {
  // n T = 1000, 3000; (4000)^2 / (V + 1000 + 9000).
  const std::vector<NeymanStratum> strata = {{1000, 0, 1}, {1000, 0, 3}};
  const std::vector<int64_t> rows = Allot(strata, 70000);
  // 16e6 / 80000 = 200: 50 and 150.
  EXPECT_EQ(rows, (std::vector<int64_t>{50, 150}));
}

TEST(NeymanAllot, TakesAllWithoutVarianceToSpend) {
  const std::vector<NeymanStratum> strata = {{100, 5, 1}, {40, 8, 0}, {300, 10, 2}};
  EXPECT_EQ(Allot(strata, 0), (std::vector<int64_t>{100, 8, 300}));
  EXPECT_EQ(Allot(strata, -5), (std::vector<int64_t>{100, 8, 300}));
}

TEST(NeymanAllot, KeepsFloorsWhenTheyMeetTheVariance) {
  const std::vector<NeymanStratum> strata = {{100, 5, 1}, {40, 8, 0}, {300, 10, 2}};
  EXPECT_EQ(Allot(strata, 1e9), (std::vector<int64_t>{5, 8, 10}));
}

TEST(NeymanAllot, SpendsWhatACapSaves) {
  // The second stratum would need more rows than it has. Read whole, it adds no variance.
  const std::vector<NeymanStratum> strata = {{10000, 16, 1}, {50, 16, 1000}};
  const std::vector<int64_t> rows = Allot(strata, 1e6);
  EXPECT_EQ(rows[1], 50);
  // 1e8 (1/b - 1e-4) <= 1e6: b = 99.01.
  EXPECT_EQ(rows[0], 100);
}

TEST(NeymanAllot, TakesAStratumOfHugeDeviationWhole) {
  const std::vector<NeymanStratum> strata = {{1000, 16, 1e100}, {1000, 16, 1}};
  const std::vector<int64_t> rows = Allot(strata, 10000);
  EXPECT_EQ(rows[0], 1000);
}

TEST(NeymanAllot, VarianceIsNotAboveUniformsAtTheSameRows) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 1000; ++round) {
    std::vector<NeymanStratum> strata(2 + round % 8);
    int64_t population = 0;
    for (NeymanStratum& s : strata) {
      s.token_count = 200 + static_cast<int64_t>(20000 * unit(random) * unit(random));
      s.floor = 0;
      s.deviation = std::exp(4 * unit(random));
      population += s.token_count;
    }
    std::vector<int64_t> one(strata.size(), 1);
    const std::vector<int64_t> rows = Allot(strata, Variance(strata, one) * 0.003 * unit(random));
    // Compares with uniform sampling of the same number of rows. At best, if the means of the
    // strata are equal, its variance is that of the proportional allotment.
    const double rate = static_cast<double>(Total(rows)) / static_cast<double>(population);
    double uniform = 0;
    for (const NeymanStratum& s : strata) {
      const double n = static_cast<double>(s.token_count);
      uniform += n * s.deviation * s.deviation * (1 / rate - 1);
    }
    ASSERT_LE(Variance(strata, rows), uniform * (1 + 1e-2)) << "round " << round;
  }
}

}  // namespace
}  // namespace spillway
