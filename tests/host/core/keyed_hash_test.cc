#include "host/core/keyed_hash.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <unordered_set>
#include <vector>

namespace spillway {
namespace {

// 6 standard deviations above the mean of a chi-square with this many degrees of freedom.
double ChiSquareLimit(double degrees) { return degrees + 6 * std::sqrt(2 * degrees); }

double ChiSquare(const std::vector<int64_t>& counts, double expected) {
  double sum = 0;
  for (int64_t c : counts) sum += (c - expected) * (c - expected) / expected;
  return sum;
}

TEST(TokenHash, OfManyTokensAtOnceIsTheSame) {
  const SampleKey key = MakeSampleKey(7, 3, 5);
  for (const uint32_t limit : {0u, 1u << 25, 1u << 31, ~0u}) {
    for (const uint32_t first : {0u, 32u, 77u, ~0u - 40, ~0u - 5}) {
      const uint32_t below = TokensBelow(key, first, limit);
      for (uint32_t bit = 0; bit < 32; ++bit) {
        ASSERT_EQ(below >> bit & 1, TokenHash(key, first + bit) < limit ? 1u : 0u)
            << first << " + " << bit << " below " << limit;
      }
    }
  }
}

// The tokens of a context are consecutive numbers, which a weak hash spreads badly. The spread must
// be neither too uneven nor, as that of a counter, too even.
TEST(TokenHash, SpreadsConsecutiveTokensUniformly) {
  constexpr int kCells = 1024;
  constexpr int kTokens = 1 << 18;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const SampleKey key = MakeSampleKey(seed, static_cast<int>(seed % 3), 5);
    std::vector<int64_t> high(kCells), low(kCells), pairs(kCells);
    uint32_t before = 0;
    for (uint32_t t = 0; t < kTokens; ++t) {
      const uint32_t u = TokenHash(key, t);
      ++high[u >> 22];
      ++low[u & 1023];
      ++pairs[(u >> 27) << 5 | before >> 27];
      before = u;
    }
    for (const auto& counts : {high, low, pairs}) {
      const double chi = ChiSquare(counts, double{kTokens} / kCells);
      EXPECT_LT(chi, ChiSquareLimit(kCells - 1)) << "seed " << seed;
      EXPECT_GT(chi, 2 * (kCells - 1) - ChiSquareLimit(kCells - 1)) << "seed " << seed;
    }
  }
}

// Hashes of one token over many seeds, layers, heads and steps.
TEST(TokenHash, SpreadsKeysUniformly) {
  constexpr int kCells = 256;
  constexpr int kKeys = 1 << 15;
  std::vector<int64_t> seeds(kCells), layers(kCells), heads(kCells), steps(kCells);
  for (int i = 0; i < kKeys; ++i) {
    ++seeds[TokenHash(MakeSampleKey(i, 3, 1), 4711) >> 24];
    ++layers[TokenHash(MakeSampleKey(9, i, 1), 4711) >> 24];
    ++heads[TokenHash(MakeSampleKey(9, 3, i), 4711) >> 24];
    ++steps[MakeSampleOrder(9, 3, 1, 8192 + i).phase >> 24];
  }
  for (const auto& counts : {seeds, layers, heads, steps}) {
    EXPECT_LT(ChiSquare(counts, double{kKeys} / kCells), ChiSquareLimit(kCells - 1));
  }
}

TEST(TokenHash, IsABijection) {
  const SampleKey key = MakeSampleKey(77, 2, 4);
  std::set<uint32_t> seen;
  for (uint32_t t = 0; t < 100000; ++t) ASSERT_TRUE(seen.insert(TokenHash(key, t)).second);
}

// Tokens of the resident sample have the first places, the others those after them. The step
// rotates the places within each part, and no place is taken twice.
TEST(SamplePlace, TurnsTheResidentSampleAndTheRestEachWithinItself) {
  for (const uint32_t resident : {0u, 1u, 42'949'672u, 1u << 28}) {
    std::unordered_set<uint32_t> seen;
    uint64_t in_resident = 0;
    for (int64_t n = 5000; n < 5004; ++n) {
      const SampleOrder order = MakeSampleOrder(3, 2, 1, n, resident);
      EXPECT_TRUE(resident == 0 ? order.resident_phase == 0 : order.resident_phase < resident);
      for (uint32_t t = 0; t < 50000; ++t) {
        const uint32_t u = TokenHash(order.key, t);
        const uint32_t place = SamplePlace(order, t);
        ASSERT_EQ(u < resident, place < resident);
        ASSERT_TRUE(seen.insert(place).second);
        in_resident += place < resident;
        const uint64_t part = u < resident ? resident : (uint64_t{1} << 32) - resident;
        const uint64_t start = u < resident ? 0 : resident;
        const uint64_t phase = u < resident ? order.resident_phase : order.phase;
        ASSERT_EQ(place, start + (u - start + part - phase) % part);
      }
      seen.clear();
    }
    const double share = static_cast<double>(resident) / 4294967296.0;
    EXPECT_NEAR(static_cast<double>(in_resident), 200000 * share,
                5 * std::sqrt(200000 * share) + 1);
  }
}

TEST(SampleThreshold, TakesTheShareAskedFor) {
  EXPECT_EQ(SampleThreshold(10, 10), uint64_t{1} << 32);
  EXPECT_EQ(SampleThreshold(11, 10), uint64_t{1} << 32);
  EXPECT_EQ(SampleThreshold(0, 10), 0u);
  EXPECT_EQ(SampleThreshold(1, 4), uint64_t{1} << 30);
}

TEST(SampleThreshold, SampleSizesAreBinomial) {
  constexpr int kPopulation = 8000, kWanted = 400, kSeeds = 2000;
  const uint64_t threshold = SampleThreshold(kWanted, kPopulation);
  double sum = 0, square = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const SampleOrder order = MakeSampleOrder(seed, 0, 0, kPopulation);
    int count = 0;
    for (uint32_t t = 0; t < kPopulation; ++t) count += SamplePlace(order, t) < threshold;
    sum += count;
    square += double{1} * (count - kWanted) * (count - kWanted);
  }
  const double variance = kWanted * (1 - double{kWanted} / kPopulation);
  EXPECT_NEAR(sum / kSeeds, kWanted, 5 * std::sqrt(variance / kSeeds));
  EXPECT_NEAR(square / kSeeds / variance, 1, 5 * std::sqrt(2.0 / kSeeds));
}

}  // namespace
}  // namespace spillway
