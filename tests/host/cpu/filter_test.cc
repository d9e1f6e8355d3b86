#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "host/core/keyed_hash.h"
#include "host/cpu/kernels.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

TEST(FilterTokens, MatchesAScalarLoop) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    const int64_t count = 1 + random() % 1000;
    const uint32_t first = static_cast<uint32_t>(random() % (uint64_t{1} << 31));
    std::vector<uint16_t> bins(count);
    for (uint16_t& b : bins) b = static_cast<uint16_t>(random() % 4100);
    if (round % 5 == 0) bins[random() % count] = 0xFFFF;
    const uint16_t near = static_cast<uint16_t>(round % 7 == 0 ? 0xFFFF : random() % 4200);
    const SampleKey key = MakeSampleKey(random(), round % 11, round % 3);
    const uint32_t phase = static_cast<uint32_t>(random());
    const uint64_t thresholds[] = {0, 1, uint64_t{1} << 28, 0xFFFFFFFFu, uint64_t{1} << 32};
    const uint64_t far = thresholds[round % 5];
    std::vector<uint32_t> wanted;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t u = TokenHash(key, first + static_cast<uint32_t>(i)) - phase;
      if (bins[i] >= near || u < far) wanted.push_back(static_cast<uint32_t>(i));
    }
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      // Room for count and no more, so that a sanitizer sees a write beyond.
      std::vector<uint32_t> got(count, 0xABABABABu);
      got.resize(FilterTokens(bins.data(), first, count, near, key, phase, far, got.data()));
      EXPECT_EQ(got, wanted) << "round " << round << " count " << count;
      AppendBytes(got, out);
    });
  }
}

}  // namespace
}  // namespace spillway
