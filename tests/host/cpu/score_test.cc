#include "host/core/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "host/core/exp.h"
#include "host/core/histogram.h"
#include "host/cpu/kernels.h"
#include "tests/host/cpu/code_page.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

constexpr int kKeys = kPageTokenCount;

// A page of random levels and a random quantised query group.
struct Case {
  int d;
  int bits;
  int group;
  CodePage page;
  std::vector<std::vector<int>> key_levels;    // [key][d]
  std::vector<std::vector<int>> query_levels;  // [head][d], in [-8, 7]
  std::vector<int8_t> weights;
  ScoreQuery query;

  Case(int d_in, int bits_in, int group_in)
      : d(d_in), bits(bits_in), group(group_in), page(RotationLayout(d, bits)) {
    std::mt19937 random(d * 100 + bits * 20 + group);
    std::uniform_int_distribution<int> key_level(0, (1 << bits) - 1), query_level(-8, 7);
    std::uniform_real_distribution<float> factor(0.5f, 1.5f);
    key_levels.assign(kKeys, std::vector<int>(d));
    for (int t = 0; t < kKeys; ++t) {
      for (int j = 0; j < d; ++j) page.SetLevel(t, j, key_levels[t][j] = key_level(random));
      page.SetFactor(t, factor(random));
    }
    // The extremes: every level lowest, highest; a key at the centre.
    for (int j = 0; j < d; ++j) {
      page.SetLevel(5, j, key_levels[5][j] = 0);
      page.SetLevel(6, j, key_levels[6][j] = (1 << bits) - 1);
    }
    page.SetFactor(7, 0);
    query.layout = RotationLayout(d, bits);
    query.row_count = group;
    weights.assign(static_cast<size_t>(group) * query.layout.dims, 0);
    query_levels.assign(group, std::vector<int>(d));
    for (int g = 0; g < group; ++g) {
      int total = 0;
      for (int j = 0; j < d; ++j) {
        const int w = g == 1 ? -8 : g == 2 ? 7 : query_level(random);
        query_levels[g][j] = w;
        total += 2 * w + 1;
        weights[g * query.layout.dims + j] = static_cast<int8_t>(2 * (2 * w + 1));
      }
      query.offset[g] = -((1 << bits) - 1) * total;
      query.coefficient[g] = 1;
    }
    query.weights = weights.data();
  }
};

// fp32 in the one order: product in integers, coefficient, factor.
float ExpectedLogit(const Case& c, int head, int key) {
  const int64_t sum = reference::IntegerProduct(c.key_levels[key], c.query_levels[head], c.bits);
  return c.query.coefficient[head] * static_cast<float>(sum) * c.page.Factor(key);
}

class Score : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Score, IntegerProductsAreExact) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    Case c(d, bits, group);
    for (int t = 0; t < kKeys; ++t) c.page.SetFactor(t, 1);
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<float> logits(group * kKeys);
      AsymmetricLogits(c.query, {c.page.data()}, logits.data());
      for (int g = 0; g < group; ++g) {
        for (int t = 0; t < kKeys; ++t) {
          const auto wanted = reference::IntegerProduct(c.key_levels[t], c.query_levels[g], bits);
          ASSERT_EQ(logits[g * kKeys + t], static_cast<double>(wanted)) << g << " " << t;
        }
      }
      AppendBytes(logits, out);
    });
  }
}

TEST_P(Score, GroupAndHeadBinsMatchAScalarRecomputation) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    Case c(d, bits, group);
    for (int g = 0; g < group; ++g) {
      // Logits of a few units, and one head whose difference passes the cap.
      c.query.coefficient[g] = 8.0f / static_cast<float>(d * (1 << bits) * 2);
      c.query.reference[g] = g == 3 ? -40.0f : 1.5f + 0.25f * static_cast<float>(g);
      c.query.head_weight[g] = 1.0f / static_cast<float>(3 + 5 * g);
    }
    for (const auto& [tile_begin, tile_end] : {std::pair(0, 8), std::pair(2, 6)}) {
      const int count = (tile_end - tile_begin) * kTileTokenCount;
      SameOnEveryTarget([&, tile_begin = tile_begin,
                         tile_end = tile_end](std::vector<std::byte>& out) {
        std::vector<uint16_t> bins(count), plain(count);
        std::vector<std::vector<uint16_t>> heads(group, std::vector<uint16_t>(count));
        std::vector<uint16_t*> pointers;
        for (auto& h : heads) pointers.push_back(h.data());
        AsymmetricBins(c.query, {c.page.data()}, tile_begin, tile_end, bins.data(),
                       pointers.data());
        AsymmetricBins(c.query, {c.page.data()}, tile_begin, tile_end, plain.data(), nullptr);
        EXPECT_EQ(bins, plain);
        for (int i = 0; i < count; ++i) {
          float score = 0;
          for (int g = 0; g < group; ++g) {
            const float l = ExpectedLogit(c, g, tile_begin * kTileTokenCount + i);
            const float e = ScoreExp2(l - c.query.reference[g]);
            ASSERT_EQ(heads[g][i], std::bit_cast<uint32_t>(e) >> kScoreBinShift) << g << " " << i;
            score = std::fma(e, c.query.head_weight[g], score);
          }
          ASSERT_EQ(bins[i], std::bit_cast<uint32_t>(score) >> kScoreBinShift) << i;
        }
        AppendBytes(bins, out);
      });
    }
  }
}

TEST_P(Score, HammingBinsCountMatchesOfTheTopPlane) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    Case c(d, bits, group);
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

INSTANTIATE_TEST_SUITE_P(Shapes, Score,
                         ::testing::Combine(::testing::Values(64, 80, 96, 128, 256),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) + "b" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(ExactBins, MatchAScalarRecomputation) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (int group = 1; group <= kGroupMax; ++group) {
    constexpr int64_t kStride = 160;
    std::vector<float> logits(group * kStride);
    ScoreQuery query;
    for (float& l : logits) l = 6 * normal(random);
    logits[3] = 1e30f;
    logits[4] = -1e30f;
    for (int g = 0; g < group; ++g) {
      query.reference[g] = 3 + normal(random);
      query.head_weight[g] = 1.0f / static_cast<float>(3 + 5 * g);
    }
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<uint16_t> bins(kStride);
      std::vector<std::vector<uint16_t>> heads(group, std::vector<uint16_t>(kStride));
      std::vector<uint16_t*> pointers;
      for (auto& h : heads) pointers.push_back(h.data());
      ExactBins(query, logits.data(), kStride, group, kStride, bins.data(), pointers.data());
      for (int i = 0; i < kStride; ++i) {
        float score = 0;
        for (int g = 0; g < group; ++g) {
          const float x = logits[g * kStride + i] * kExpLog2E;
          const float e = ScoreExp2(x - query.reference[g]);
          ASSERT_EQ(heads[g][i], std::bit_cast<uint32_t>(e) >> kScoreBinShift);
          score = std::fma(e, query.head_weight[g], score);
        }
        ASSERT_EQ(bins[i], std::bit_cast<uint32_t>(score) >> kScoreBinShift) << i;
      }
      AppendBytes(bins, out);
    });
  }
}

TEST(SumScoreMass, MatchesAScalarRecomputation) {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  std::vector<float> logits(129);
  for (float& l : logits) l = 20 * normal(random);
  for (const int64_t count : {0, 1, 15, 16, 17, 64, 127, 128, 129}) {
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      float max = -3;
      for (int64_t i = 0; i < count; ++i) max = std::max(max, logits[i]);
      ASSERT_EQ(MaxLogit(logits.data(), count, -3), max);
      uint64_t mass = 0;
      for (int64_t i = 0; i < count; ++i) mass += ScoreMass(logits[i], max);
      ASSERT_EQ(SumScoreMass(logits.data(), count, max), mass);
      AppendBytes(std::vector<uint64_t>{mass}, out);
    });
  }
}

}  // namespace
}  // namespace spillway
