#include "host/methods/hamming/hamming_bins.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/host/cpu/score_case.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

class HammingBinsOf : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(HammingBinsOf, MatchesOfTheTopPlane) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    ScoreCase c(d, bits, group);
    std::mt19937 random(group);
    std::vector<std::vector<bool>> query_bits(group, std::vector<bool>(d));
    std::vector<int8_t> weights(c.query.layout.dims, 0);
    ScoreQuery q = c.query;
    q.row_count = 1;
    q.offset[0] = 0;
    for (int j = 0; j < d; ++j) {
      int ones = 0;
      for (int g = 0; g < group; ++g) ones += query_bits[g][j] = random() % 2;
      weights[j] = static_cast<int8_t>(2 * ones - group);
      q.offset[0] += group - ones;
    }
    q.weights = weights.data();
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<uint16_t> bins(6 * kTileTokenCount);
      HammingBins(q, {c.page.data()}, 2, 8, bins.data());
      for (size_t i = 0; i < bins.size(); ++i) {
        int matches = 0;
        for (int g = 0; g < group; ++g) {
          for (int j = 0; j < d; ++j) {
            matches +=
                (c.page.Level(32 + static_cast<int>(i), j) >> (bits - 1)) == query_bits[g][j];
          }
        }
        ASSERT_EQ(bins[i], matches) << i;
      }
      AppendBytes(bins, out);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, HammingBinsOf,
                         ::testing::Combine(::testing::Values(64, 80, 96, 128, 256),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) + "b" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace spillway
