#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "host/core/keyed_hash.h"
#include "host/cpu/kernels.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

std::vector<uint16_t> RandomBins(std::mt19937_64& random, int64_t count) {
  std::vector<uint16_t> bins(count);
  for (uint16_t& b : bins) b = static_cast<uint16_t>(random() % 4096);
  if (random() % 2 == 0) bins[random() % count] = 0xFFFF;
  return bins;
}

TEST(FilterBins, MatchesAScalarLoop) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 200; ++round) {
    const int64_t count = 1 + random() % 1000;
    const std::vector<uint16_t> bins = RandomBins(random, count);
    const uint16_t least = static_cast<uint16_t>(round % 7 == 0 ? 0xFFFF : random() % 4200);
    std::vector<uint32_t> wanted;
    for (int64_t i = 0; i < count; ++i) {
      if (bins[i] >= least) wanted.push_back(static_cast<uint32_t>(i));
    }
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      // Memory for `count` tokens and no more, so that a sanitizer sees a write beyond it.
      std::vector<uint32_t> got(count, 0xABABABABu);
      got.resize(FilterBins(bins.data(), count, least, got.data()));
      EXPECT_EQ(got, wanted) << "round " << round << " count " << count;
      AppendBytes(got, out);
    });
  }
}

TEST(FilterTokens, MatchesAScalarLoop) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    const int64_t count = 1 + random() % 1000;
    const uint32_t first = static_cast<uint32_t>(random() % (uint64_t{1} << 31));
    const std::vector<uint16_t> bins = RandomBins(random, count);
    const uint32_t resident =
        round % 4 == 0 ? 0 : static_cast<uint32_t>(random() >> (32 + round % 8));
    const SampleOrder order = MakeSampleOrder(random(), round % 11, round % 3,
                                              static_cast<int64_t>(random() >> 1), resident);
    SampleLimits limits;
    const uint64_t thresholds[] = {0,           1,           uint64_t{1} << 17,
                                   123'456'789, 0xFFFFFFFFu, uint64_t{1} << 32};
    limits.count = 1 + round % (kTailStrataMax + 1);
    for (int e = 0; e < limits.count; ++e) {
      limits.edge[e] = static_cast<uint16_t>(e * 85);
      limits.limit[e] = PlaceLimit(thresholds[random() % std::size(thresholds)]);
    }
    std::vector<uint32_t> wanted;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t limit = limits.limit[std::min(bins[i] / 85, limits.count - 1)];
      const uint32_t place = SamplePlace(order, first + static_cast<uint32_t>(i));
      if ((place >> kSampleLimitShift) < limit) wanted.push_back(static_cast<uint32_t>(i));
    }
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<uint32_t> got(count, 0xABABABABu);
      got.resize(FilterTokens(bins.data(), first, count, order, limits, got.data()));
      EXPECT_EQ(got, wanted) << "round " << round << " count " << count;
      AppendBytes(got, out);
    });
  }
}

TEST(SampleLimits, CoverTheirThreshold) {
  EXPECT_EQ(PlaceLimit(0), 0);
  EXPECT_EQ(PlaceLimit(uint64_t{1} << 32), 1 << (32 - kSampleLimitShift));
  std::mt19937_64 random(6);
  for (int round = 0; round < 1000; ++round) {
    const uint64_t threshold = 1 + (random() >> (32 + random() % 32));
    const uint64_t limit = PlaceLimit(threshold);
    EXPECT_LT((threshold - 1) >> kSampleLimitShift, limit) << threshold;
    EXPECT_LT((limit << kSampleLimitShift) - threshold, uint64_t{1} << kSampleLimitShift);
  }
}

}  // namespace
}  // namespace spillway
