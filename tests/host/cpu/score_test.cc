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
#include "tests/host/cpu/score_case.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

// fp32 in the one order: product in integers, coefficient, factor.
float ExpectedLogit(const ScoreCase& c, int head, int key) {
  const int64_t sum = reference::IntegerProduct(c.key_levels[key], c.query_levels[head], c.bits);
  return c.query.coefficient[head] * static_cast<float>(sum) * c.page.Factor(key);
}

class Score : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Score, IntegerProductsAreExact) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    ScoreCase c(d, bits, group);
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
    ScoreCase c(d, bits, group);
    for (int g = 0; g < group; ++g) {
      // Logits of a few units, and one head whose difference passes the cap.
      c.query.coefficient[g] = 8.0f / static_cast<float>(d * (1 << bits) * 2);
      c.query.references.reference[g] = g == 3 ? -40.0f : 1.5f + 0.25f * static_cast<float>(g);
      c.query.references.head_weight[g] = 1.0f / static_cast<float>(3 + 5 * g);
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
            const float e = ScoreExp2(l - c.query.references.reference[g]);
            ASSERT_EQ(heads[g][i], std::bit_cast<uint32_t>(e) >> kScoreBinShift) << g << " " << i;
            score = std::fma(e, c.query.references.head_weight[g], score);
          }
          ASSERT_EQ(bins[i], std::bit_cast<uint32_t>(score) >> kScoreBinShift) << i;
        }
        AppendBytes(bins, out);
      });
    }
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
    ScoreReferences references;
    for (float& l : logits) l = 6 * normal(random);
    logits[3] = 1e30f;
    logits[4] = -1e30f;
    for (int g = 0; g < group; ++g) {
      references.reference[g] = 3 + normal(random);
      references.head_weight[g] = 1.0f / static_cast<float>(3 + 5 * g);
    }
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<uint16_t> bins(kStride);
      std::vector<std::vector<uint16_t>> heads(group, std::vector<uint16_t>(kStride));
      std::vector<uint16_t*> pointers;
      for (auto& h : heads) pointers.push_back(h.data());
      ExactBins(references, logits.data(), kStride, group, kStride, bins.data(), pointers.data());
      for (int i = 0; i < kStride; ++i) {
        float score = 0;
        for (int g = 0; g < group; ++g) {
          const float x = logits[g * kStride + i] * kExpLog2E;
          const float e = ScoreExp2(x - references.reference[g]);
          ASSERT_EQ(heads[g][i], std::bit_cast<uint32_t>(e) >> kScoreBinShift);
          score = std::fma(e, references.head_weight[g], score);
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
