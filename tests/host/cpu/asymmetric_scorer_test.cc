// Compares the scores and rank errors of a sequence with fp64. Strays are left out.
#include "host/cpu/asymmetric_scorer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "host/cpu/workspace.h"
#include "tests/host/cpu/cpu_layer.h"
#include "tests/reference/codes.h"
#include "tests/reference/page_index.h"
#include "tests/reference/ranking.h"

namespace spillway {
namespace {

using reference::BinRange;
using reference::Context;

constexpr int kGroup = 3;
constexpr int64_t kTokens = 4700;            // 36 pages, of which every second is in the sample
constexpr int64_t kBegin = 50, kEnd = 4500;  // neither at a page's border
constexpr int kStrayKeys[] = {200, 1500, 2817};
constexpr int kStrayValue = 2000;
constexpr int kPeak = 5 * 128 + 60;  // in a page that is not in the sample

class AsymmetricScores : public ::testing::TestWithParam<int> {  // bits per dimension
 protected:
  // peaked: nearly all of the first head's weight is on one key.
  explicit AsymmetricScores(bool peaked = false)
      : spec_(RotationSpec(1, kGroup, 64, DType::kF32, GetParam())),
        world_(spec_),
        context_(reference::TraceContext(spec_, kTokens, 63)),
        q_(reference::TraceQueries(context_, 1, 64, 1.5)),
        layer_(world_) {
    // Outlier keys along the first query: their estimates are above all others, or below.
    for (const int t : kStrayKeys) {
      for (int i = 0; i < 64; ++i) {
        context_.k[t * 64 + i] = (t == kStrayKeys[1] ? -1e4f : 1e4f) * q_[i];
      }
    }
    for (int i = 0; i < 64; ++i) context_.v[kStrayValue * 64 + i] *= 1e6f;
    for (int i = 0; i < 64 && peaked; ++i) {
      context_.k[kPeak * 64 + i] = 4.5f * q_[i];
      q_[i] *= 12;
    }
    layer_.Append(context_, 0, kTokens);
    kv_ = context_.Head(0);
    index_ = reference::PageIndex::Of(kv_);
    const std::vector<float> rotation = MakeRotation(64, spec_.hash.seed, 0);
    for (int64_t t = 0; t < index_.closed_token_count(); ++t) {
      codes_.push_back(
          reference::EncodeRotated(kv_.Key(t), index_.CentreOf(t), rotation, GetParam()));
    }
    for (int g = 0; g < kGroup; ++g) {
      const std::vector<double> q = reference::Query(spec_, q_, 0, g);
      queries_.push_back(reference::QuantiseQuery(q, rotation));
      logits_.emplace_back();
      centres_.emplace_back();
      for (int64_t t = 0; t < index_.closed_token_count(); t += 128) {
        centres_[g].push_back(spec_.softmax_scale * reference::Dot(q, index_.CentreOf(t)));
      }
      for (int64_t t = 0; t < index_.closed_token_count(); ++t) {
        logits_[g].push_back(
            reference::AsymmetricLogit(codes_[t], queries_[g], GetParam(), spec_.softmax_scale) +
            spec_.softmax_scale * reference::Dot(q, index_.CentreOf(t)));
      }
    }
    attend_.rows = &layer_.rows();
    attend_.policy = DefaultPolicy(spec_);
    attend_.q = reinterpret_cast<const std::byte*>(q_.data());
    attend_.query_count = 1;
    attend_.visible = {kTokens};
    attend_context_.shapes = &spec_;
    attend_context_.model = &world_.model();
    attend_context_.index = &layer_.index();
    attend_context_.attend = &attend_;
    group_ = GroupQueries(attend_context_, 0, spec_.group(), 0, 1);
    keys_ = {&attend_context_, &group_, 0, 0, kBegin, kEnd};
  }

  bool Certain(int64_t token) const {
    return codes_[token].border_distance > 1e-5 && codes_[token].factor_margin > 1e-5;
  }

  void ExpectBins(const AsymmetricScorer& scorer);

  const ModelSpec spec_;
  CpuWorld world_;
  Context context_;
  std::vector<float> q_;
  CpuLayer layer_;
  reference::KeyValues kv_;
  reference::PageIndex index_;
  std::vector<reference::RotationCode> codes_;
  std::vector<reference::QuantisedQuery> queries_;
  std::vector<std::vector<double>> logits_;   // [G][closed tokens]
  std::vector<std::vector<double>> centres_;  // [G][closed pages]; logits of the centres
  AttendQuery attend_;
  AttendContext attend_context_;
  GroupQueries group_;
  ScoredKeys keys_;
};

// Compares the bins of the group and of each head with the reference.
void AsymmetricScores::ExpectBins(const AsymmetricScorer& scorer) {
  std::vector<uint16_t> bins(kTokens + 128);
  std::vector<std::vector<uint16_t>> heads(kGroup, std::vector<uint16_t>(kTokens + 128));
  for (int64_t page = kBegin / 128; page * 128 < kEnd; ++page) {
    uint16_t* of_heads[kGroup];
    for (int g = 0; g < kGroup; ++g) of_heads[g] = heads[g].data() + page * 128;
    ASSERT_TRUE(scorer.Bins(page, 0, 8, bins.data() + page * 128, of_heads).ok());
  }
  const std::vector<double> scores =
      reference::GroupScores(logits_, kBegin, kEnd, index_.strays, centres_);
  int64_t compared = 0;
  for (int64_t t = kBegin; t < kEnd; ++t) {
    if (index_.strays[t] || !Certain(t)) continue;
    ++compared;
    const BinRange wanted = reference::RangeOf(scores[t - kBegin], 1e-4);
    ASSERT_GE(bins[t], wanted.low) << t;
    ASSERT_LE(bins[t], wanted.high) << t;
  }
  EXPECT_GT(compared, (kEnd - kBegin) * 9 / 10);
  for (int g = 0; g < kGroup; ++g) {
    const std::vector<double> of_head =
        reference::HeadScores(logits_[g], kBegin, kEnd, index_.strays, centres_[g]);
    for (int64_t t = kBegin; t < kEnd; ++t) {
      if (index_.strays[t] || !Certain(t)) continue;
      const BinRange wanted = reference::RangeOf(of_head[t - kBegin], 1e-4);
      ASSERT_GE(heads[g][t], wanted.low) << g << " " << t;
      ASSERT_LE(heads[g][t], wanted.high) << g << " " << t;
    }
  }
}

TEST_P(AsymmetricScores, BinsAreOfSharesThatStraysHaveNoPartIn) {
  ASSERT_GT(index_.margin, 1e-5);
  for (const int t : kStrayKeys) ASSERT_TRUE(index_.strays[t]);
  ASSERT_TRUE(index_.strays[kStrayValue]);
  AsymmetricScorer scorer(keys_);
  ASSERT_TRUE(scorer.Prepare().ok());
  ExpectBins(scorer);
  EXPECT_FALSE(scorer.Reweigh());
}

class PeakedScores : public AsymmetricScores {
 protected:
  PeakedScores() : AsymmetricScores(/*peaked=*/true) {}
};

// Weighted by the sample alone, the first head's tokens would rank above all others.
TEST_P(PeakedScores, HeadsAreWeightedAnewByTheirSums) {
  ASSERT_FALSE(index_.strays[kPeak]);
  AsymmetricScorer scorer(keys_);
  ASSERT_TRUE(scorer.Prepare().ok());
  for (int64_t page = kBegin / 128; page * 128 < kEnd; ++page) {
    uint16_t bins[128];
    ASSERT_TRUE(scorer.Bins(page, 0, 8, bins, nullptr).ok());
  }
  ASSERT_TRUE(scorer.Reweigh()) << "choose another peak";
  ExpectBins(scorer);
  EXPECT_FALSE(scorer.Reweigh());
}

TEST_P(AsymmetricScores, RankVariancesAreOfScoredTokensWithoutStrays) {
  AsymmetricScorer scorer(keys_);
  ASSERT_TRUE(scorer.Prepare().ok());
  // In reverse order: threads take the pages in any order.
  uint16_t bins[128];
  for (int64_t page = (kEnd - 1) / 128; page >= kBegin / 128; --page) {
    ASSERT_TRUE(scorer.Bins(page, 0, 8, bins, nullptr).ok());
  }
  scorer.Reweigh();
  std::vector<double> got(kGroup);
  scorer.RankVariances(got);
  for (int g = 0; g < kGroup; ++g) {
    std::vector<reference::RotationCode> codes;
    std::vector<double> logits;
    for (int64_t t = kBegin; t < kEnd; ++t) {
      if (index_.strays[t]) continue;
      codes.push_back(codes_[t]);
      logits.push_back(logits_[g][t]);
    }
    const double wanted =
        reference::RankVariance(codes, logits, queries_[g], GetParam(), spec_.softmax_scale);
    EXPECT_NEAR(got[g], wanted, 2e-3 * wanted) << g;
    EXPECT_GT(wanted, 1e-3);
    EXPECT_LT(wanted, 36);
  }
}

INSTANTIATE_TEST_SUITE_P(Bits, PeakedScores, ::testing::Values(2, 3),
                         [](const auto& info) { return "b" + std::to_string(info.param); });
INSTANTIATE_TEST_SUITE_P(Bits, AsymmetricScores, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return "b" + std::to_string(info.param); });

}  // namespace
}  // namespace spillway
