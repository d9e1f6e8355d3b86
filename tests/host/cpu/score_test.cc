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
#include "host/core/value_code.h"
#include "host/cpu/kernels.h"
#include "tests/host/cpu/score_case.h"
#include "tests/host/cpu/targets.h"
#include "tests/reference/elements.h"

namespace spillway {
namespace {

// The fixed order in fp32: the integer product times the coefficient, then a fused multiply-add
// with the factor and the part of the page's centre.
float ExpectedLogit(const ScoreCase& c, int head, int key, float centre_logit) {
  const int64_t sum = reference::IntegerProduct(c.key_levels[key], c.query_levels[head], c.bits);
  return std::fma(c.query.coefficient[head] * static_cast<float>(sum), c.page.Factor(key),
                  centre_logit);
}

// Adds pairs of chains that lie 8, 4, 2, 1 apart.
float SumInPairs(std::vector<float> chains) {
  for (size_t apart = chains.size() / 2; apart > 0; apart /= 2) {
    for (size_t j = 0; j < apart; ++j) chains[j] += chains[j + apart];
  }
  return chains[0];
}

class Score : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Score, IntegerProductsAreExact) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    ScoreCase c(d, bits, group);
    for (int t = 0; t < kKeys; ++t) c.page.SetFactor(t, 1);
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<float> logits(group * kKeys);
      const std::vector<float> centre_logits(group, 0.0f);
      AsymmetricLogits(c.query, {c.page.data()}, centre_logits.data(), logits.data());
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

TEST_P(Score, LogitsAreCutAndTakeThePagesCentre) {
  const auto [d, bits] = GetParam();
  ScoreCase c(d, bits, 3);
  c.page.SetFactor(9, 3e38f);
  for (int g = 0; g < 3; ++g) c.query.coefficient[g] = 0.01f;
  const std::vector<float> centre_logits = {-3.75f, 1e37f, 2e-3f};
  SameOnEveryTarget([&](std::vector<std::byte>& out) {
    std::vector<float> logits(3 * kKeys);
    AsymmetricLogits(c.query, {c.page.data()}, centre_logits.data(), logits.data());
    for (int g = 0; g < 3; ++g) {
      for (int t = 0; t < kKeys; ++t) {
        const float x = ExpectedLogit(c, g, t, centre_logits[g]);
        ASSERT_EQ(logits[g * kKeys + t], std::clamp(x, -1e38f, 1e38f)) << g << " " << t;
      }
    }
    AppendBytes(logits, out);
  });
}

TEST_P(Score, BinsAndRankSumsMatchAScalarRecomputation) {
  const auto [d, bits] = GetParam();
  for (int group = 1; group <= kGroupMax; ++group) {
    ScoreCase c(d, bits, group);
    c.page.SetFactor(20, 2e19f);  // its square is beyond fp32
    c.page.SetFactor(21, 3e38f);
    std::vector<float> centre_logits(group);
    PageMask mask;
    for (int t = 0; t < kKeys; ++t) mask.of_slot[t] = t % 5 == 2 || t == 21 ? 0.0f : 1.0f;
    for (int g = 0; g < group; ++g) {
      // Logits of a few units, and one head whose difference exceeds the cap.
      c.query.coefficient[g] = 8.0f / static_cast<float>(d * (1 << bits) * 2);
      c.query.references.reference[g] = g == 3 ? -40.0f : 1.5f + 0.25f * static_cast<float>(g);
      c.query.references.head_weight[g] = 1.0f / static_cast<float>(3 + 5 * g);
      centre_logits[g] = 0.7f - 0.3f * static_cast<float>(g);
    }
    for (const auto& [tile_begin, tile_end] : {std::pair(0, 8), std::pair(2, 6)}) {
      const int count = (tile_end - tile_begin) * kTileTokenCount;
      SameOnEveryTarget([&, tile_begin = tile_begin,
                         tile_end = tile_end](std::vector<std::byte>& out) {
        std::vector<uint16_t> bins(count), plain(count);
        std::vector<std::vector<uint16_t>> heads(group, std::vector<uint16_t>(count));
        std::vector<uint16_t*> pointers;
        for (auto& h : heads) pointers.push_back(h.data());
        std::vector<RankSums<float>> sums(group), plain_sums(group);
        // 7 where nothing is written. Shrinkages from nothing to more than a level can have.
        std::vector<uint8_t> levels(group * kPageTokenCount, 7);
        std::vector<float> shrinkage;
        for (int g = 0; g < group; ++g) shrinkage.push_back(g % 4 == 3 ? 1e30f : 0.4f * (g % 4));
        AsymmetricBins(c.query, {c.page.data()}, centre_logits.data(), mask, tile_begin, tile_end,
                       bins.data(), pointers.data(), {levels.data(), shrinkage.data()},
                       sums.data());
        AsymmetricBins(c.query, {c.page.data()}, centre_logits.data(), mask, tile_begin, tile_end,
                       plain.data(), nullptr, {}, plain_sums.data());
        EXPECT_EQ(bins, plain);
        std::vector<std::vector<float>> weight(group, std::vector<float>(16)), error = weight;
        std::vector<double> exact_weight(group), exact_error(group);
        for (int i = 0; i < count; ++i) {
          const int t = tile_begin * kTileTokenCount + i;
          float score = 0;
          for (int g = 0; g < group; ++g) {
            // The reference is subtracted from the page's part first.
            const float x =
                ExpectedLogit(c, g, t, centre_logits[g] - c.query.references.reference[g]);
            const float e = ScoreExp2(x);
            ASSERT_EQ(heads[g][i], std::bit_cast<uint32_t>(e) >> kScoreBinShift) << g << " " << i;
            const float f_square = std::min(c.page.Factor(t) * c.page.Factor(t), 3.0e38f);
            ASSERT_EQ(levels[g * kPageTokenCount + t], ValueLevel(x, f_square, shrinkage[g]))
                << g << " " << i;
            score = std::fma(e, c.query.references.head_weight[g], score);
            if (mask.of_slot[t] == 0) continue;
            const float f = c.page.Factor(t);
            const float square = std::min(f * f, 3.0e38f);
            weight[g][t % 16] += e;
            error[g][t % 16] = std::fma(e, square, error[g][t % 16]);
            exact_weight[g] += e;
            exact_error[g] += double{e} * square;
          }
          ASSERT_EQ(bins[i], std::bit_cast<uint32_t>(score) >> kScoreBinShift) << i;
        }
        for (int g = 0; g < group; ++g) {
          EXPECT_EQ(sums[g].weight, plain_sums[g].weight);
          EXPECT_EQ(sums[g].error, plain_sums[g].error);
          EXPECT_EQ(sums[g].weight, SumInPairs(weight[g])) << g;
          EXPECT_EQ(sums[g].error, SumInPairs(error[g])) << g;
          EXPECT_NEAR(sums[g].weight, exact_weight[g], 1e-6 * exact_weight[g]);
          // A sum beyond fp32 is infinite.
          if (exact_error[g] < 3e38) {
            EXPECT_NEAR(sums[g].error, exact_error[g], 1e-6 * exact_error[g]);
          }
        }
        AppendBytes(bins, out);
        AppendBytes(sums, out);
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

// q.c in 16 chains of fused multiply-adds, each over every 16th coordinate.
TEST(CentreLogits, AreInOneOrder) {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  for (const int d : {16, 64, 80, 128, 256}) {
    for (const int group : {1, 3, 16}) {
      std::vector<float> queries(group * d), centre(d);
      for (float& x : queries) x = normal(random);
      for (float& x : centre) {
        x = static_cast<float>(reference::Round(DType::kBF16, 3 * normal(random)));
      }
      if (group == 3) {  // beyond fp32 in one direction, then in the other
        queries[0] = 3e38f;
        queries[d] = -3e38f;
        centre[0] = 8;
      }
      const std::vector<std::byte> bytes = reference::Bytes(DType::kBF16, centre);
      SameOnEveryTarget([&](std::vector<std::byte>& out) {
        std::vector<float> logits(group);
        CentreLogits(queries.data(), group, d, 0.125f, bytes.data(), logits.data());
        for (int g = 0; g < group; ++g) {
          std::vector<float> chains(16, 0.0f);
          for (int i = 0; i < d; ++i) {
            chains[i % 16] = std::fma(queries[g * d + i], centre[i], chains[i % 16]);
          }
          const float product = SumInPairs(chains) * (0.125f * kExpLog2E);
          EXPECT_EQ(logits[g], std::clamp(product, -1e37f, 1e37f)) << d << " " << g;
        }
        AppendBytes(logits, out);
      });
    }
  }
}

TEST(WeighBins, WeighsEachByItsNorm) {
  std::mt19937 random(9);
  for (const int count : {32, 96, 128}) {
    std::vector<uint16_t> bins(count);
    std::vector<uint8_t> norms(count);
    for (int i = 0; i < count; ++i) {
      bins[i] = static_cast<uint16_t>(i % 7 == 3 ? 0 : i % 7 == 4 ? 4090 : random() % 4096);
      norms[i] = static_cast<uint8_t>(i % 11 == 5 ? 255 : random() % 255);
    }
    for (const int raise : {0, 1, 64}) {
      SameOnEveryTarget([&](std::vector<std::byte>& out) {
        std::vector<uint16_t> weighed = bins;
        WeighBins(norms.data(), raise, count, weighed.data());
        for (int i = 0; i < count; ++i) {
          int wanted = std::clamp(bins[i] + 2 * (norms[i] - 127 + raise), 1, 4094);
          if (norms[i] == 255) wanted = 4095;
          if (bins[i] == 0) wanted = 0;
          ASSERT_EQ(weighed[i], wanted) << i;
        }
        AppendBytes(weighed, out);
      });
    }
  }
}

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
