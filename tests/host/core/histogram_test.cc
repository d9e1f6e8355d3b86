#include "host/core/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "host/base/limits.h"
#include "tests/reference/ranking.h"

namespace spillway {
namespace {

std::vector<uint32_t> Histogram(const std::vector<int>& bins, int bin_count) {
  std::vector<uint32_t> counts(bin_count, 0);
  for (int b : bins) ++counts[b];
  return counts;
}

// The tokens that a threshold selects, as its header says.
std::vector<int64_t> Chosen(const std::vector<int>& bins, HeavyThreshold threshold) {
  std::vector<int64_t> chosen;
  int64_t take = threshold.take;
  for (int64_t t = static_cast<int64_t>(bins.size()) - 1; t >= 0; --t) {
    if (bins[t] > threshold.bin || (bins[t] == threshold.bin && take-- > 0)) chosen.push_back(t);
  }
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

std::vector<int> RandomBins(std::mt19937& random, int count, int low, int high) {
  std::uniform_int_distribution<int> bin(low, high);
  std::vector<int> bins(count);
  for (int& b : bins) b = bin(random);
  return bins;
}

TEST(HeavyByCount, IsTheExactTopK) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    const int n = 1 + round % 97;
    const std::vector<int> bins = RandomBins(random, n, 0, 1 + round % 40);
    for (const int64_t k : {1, n / 3 + 1, n, n + 5}) {
      const std::vector<int64_t> got = Chosen(bins, HeavyByCount(Histogram(bins, 64), k));
      ASSERT_EQ(got, reference::ExactTopK(bins, k)) << "round " << round << " k " << k;
    }
  }
}

TEST(HeavyByMass, IsTheExactTopP) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 1000; ++round) {
    const int n = 1 + round % 201;
    // Scores from about e^-3 to e^3.
    const std::vector<int> bins = RandomBins(random, n, 1960, 2100);
    const double mass = 0.01 + 0.98 * unit(random);
    const int64_t floor = 1 + static_cast<int64_t>(unit(random) * 20);
    const int64_t ceiling = floor + static_cast<int64_t>(unit(random) * 100);
    const HeavyThreshold t = HeavyByMass(Histogram(bins, kScoreBinCount), mass, floor, ceiling);
    ASSERT_EQ(Chosen(bins, t), reference::ExactTopP(bins, mass, floor, ceiling))
        << "round " << round << " mass " << mass << " floor " << floor << " ceiling " << ceiling;
  }
}

TEST(HeavyByMass, TakesEverythingAtMassOne) {
  std::mt19937 random(5);
  const std::vector<int> bins = RandomBins(random, 300, 1900, 2100);
  const HeavyThreshold t = HeavyByMass(Histogram(bins, kScoreBinCount), 1, 1, 1000);
  EXPECT_EQ(Chosen(bins, t).size(), bins.size());
}

TEST(HeavyByMass, StopsAtOneDominatingToken) {
  std::vector<int> bins(1000, 1500);
  bins[17] = 2100;
  const HeavyThreshold t = HeavyByMass(Histogram(bins, kScoreBinCount), 0.95, 1, 100);
  EXPECT_EQ(Chosen(bins, t), (std::vector<int64_t>{17}));
}

TEST(BinCentre, LiesBetweenItsBinsEdges) {
  for (const int bin : {1, 100, 2032, 4000}) {
    EXPECT_EQ(reference::ScoreBin(BinCentre(bin)), bin);
    EXPECT_EQ(reference::ScoreBin(BinCentre(bin) * (1 + 1.0 / 65)), bin);
    EXPECT_EQ(reference::ScoreBin(BinCentre(bin) * (1 - 1.0 / 65)), bin);
  }
}

TEST(CutStrata, MatchesADirectWalk) {
  std::mt19937 random(6);
  for (int round = 0; round < 400; ++round) {
    const int n = 1 + random() % 5000;
    const int spread = 1 + random() % 300;
    const std::vector<int> bins = RandomBins(random, n, 1000, 1000 + spread);
    const int64_t k = 1 + random() % 300;
    const Strata strata = CutStrata(Histogram(bins, kScoreBinCount), k);
    const std::vector<int> wanted = reference::CutIntoStrata(bins, k);
    std::vector<int64_t> counts(strata.counts.size(), 0);
    for (int t = 0; t < n; ++t) {
      ASSERT_EQ(strata.of_bin[bins[t]], wanted[t]) << "round " << round << " token " << t;
      ++counts[wanted[t]];
    }
    ASSERT_EQ(strata.counts, counts);
    ASSERT_EQ(std::count(counts.begin(), counts.end(), 0), 0);
  }
}

TEST(CutStrata, DoublesFromTheHeavyCount) {
  // One token per bin: the edges are at the ranks themselves.
  std::vector<int> bins(1900);
  std::iota(bins.begin(), bins.end(), 0);
  const Strata strata = CutStrata(Histogram(bins, kScoreBinCount), 100);
  // Ranks 100 to 200, 400, 800, 1600, 2000: the last 400 of 1,900 tokens are more than a tenth.
  EXPECT_EQ(strata.counts, (std::vector<int64_t>{100, 200, 400, 800, 400}));
}

TEST(CutStrata, AnOversizedBinIsOneStratum) {
  const std::vector<int> bins(5000, 77);
  EXPECT_EQ(CutStrata(Histogram(bins, kScoreBinCount), 256).counts, (std::vector<int64_t>{5000}));
}

TEST(CutStrata, HasAtMostItsMaximum) {
  // 2^20 tokens in each bin, and one heavy token.
  std::vector<uint32_t> counts(kScoreBinCount, 1u << 20);
  const Strata strata = CutStrata(counts, 1);
  EXPECT_LE(strata.counts.size(), size_t{kTailStrataMax});
  EXPECT_EQ(std::accumulate(strata.counts.begin(), strata.counts.end(), int64_t{0}),
            int64_t{kScoreBinCount} << 20);
}

// 290 tokens in one bin, then one per bin. The edge at rank 400 is 10 tokens further.
TEST(CutStrata, LessThanATenthOfTheTailIsNotCut) {
  const auto counts = [](int after) {
    std::vector<uint32_t> histogram(kScoreBinCount, 0);
    histogram[2000] = 290;
    for (int i = 0; i < after; ++i) histogram[1999 - i] = 1;
    return CutStrata(histogram, 100).counts;
  };
  EXPECT_EQ(counts(32), (std::vector<int64_t>{290, 32}));      // of 322
  EXPECT_EQ(counts(33), (std::vector<int64_t>{290, 10, 23}));  // of 323
  EXPECT_EQ(counts(60), (std::vector<int64_t>{290, 10, 50}));
}

}  // namespace
}  // namespace spillway
