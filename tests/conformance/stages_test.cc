// Selections in two stages, and how rows and weights cover the strata.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/conformance/expect_weighted.h"
#include "tests/conformance/methods_fixture.h"

namespace spillway {
namespace {

using reference::BinRange;
using reference::Membership;

std::string Name(Selector selector) {
  constexpr const char* kNames[] = {"asymmetric", "hamming", "oracle",         "all",
                                    "int4_keys",  "quest",   "double sparsity"};
  return kNames[static_cast<int>(selector)];
}

class Stages : public MethodsTest {
 protected:
  void PrepareAll() {
    Prepare(IndexedModel(2, 2, 64, DType::kBF16, EveryIndex(16), {.bits_per_dim = 2, .seed = 5}));
  }
  void SetStages(Selector first, Selector second) {
    policy_.candidate_selector = first;
    policy_.selector = second;
  }
  // What the first selection finds: candidate_count tokens, or a quarter of all tokens.
  std::vector<Membership> Candidates(Selector first) const {
    const int64_t count = policy_.candidate_count > 0 ? policy_.candidate_count : kTokens / 4;
    return reference::TopK(RankedBy(first).bins, count);
  }
  // Bins of the second selection: tokens that the first did not find are in the lowest bin.
  static std::vector<BinRange> SecondBins(const std::vector<Membership>& found,
                                          std::vector<BinRange> bins) {
    for (size_t i = 0; i < bins.size(); ++i) {
      if (found[i] != Membership::kIn) bins[i].low = 0;
      if (found[i] == Membership::kOut) bins[i].high = 0;
    }
    return bins;
  }
};

TEST_P(Stages, TheSecondLooksAtWhatTheFirstFound) {
  PrepareAll();
  for (const Selector first : {Selector::kAsymmetric, Selector::kHamming, Selector::kQuest,
                               Selector::kDoubleSparsity, Selector::kInt4Keys}) {
    for (const Selector second : {Selector::kInt4Keys, Selector::kOracle, Selector::kAsymmetric}) {
      if (first == second) continue;
      SetStages(first, second);
      for (const int64_t count : {0, 600}) {  // 0: a quarter of the tokens
        policy_.candidate_count = count;
        kv_head_ = count > 0 ? 1 : 0;
        const std::string what = Name(first) + ", then " + Name(second);
        ASSERT_TRUE(Validate(policy_, spec_).empty()) << what;
        const std::vector<Membership> found = Candidates(first);
        const Ranked ranked = RankedBy(second);
        open_max_ = 60;
        ExpectTopK(SecondBins(found, ranked.bins), what);
        std::vector<bool> candidates;
        for (const Membership m : found) candidates.push_back(m != Membership::kOut);
        open_max_ = std::count(found.begin(), found.end(), Membership::kOpen);
        ExpectTopP(ranked.logits, what, candidates);
      }
    }
  }
}

// If all tokens are candidates, two stages give the same as one.
TEST_P(Stages, AFirstThatFindsAllChangesNothing) {
  PrepareAll();
  policy_.tail = Tail::kStratified;
  for (const HeavyKind kind : {HeavyKind::kCount, HeavyKind::kMass}) {
    policy_.heavy_kind = kind;
    policy_.candidate_selector.reset();
    policy_.selector = Selector::kInt4Keys;
    const JobItem one = sequence_->Attend(policy_, q_);
    SetStages(Selector::kQuest, Selector::kInt4Keys);
    policy_.candidate_fraction = 1;
    const JobItem two = sequence_->Attend(policy_, q_);
    ASSERT_TRUE(one.status.ok() && two.status.ok()) << one.status << two.status;
    EXPECT_EQ(one.result.out, two.result.out);
    EXPECT_EQ(one.result.lse, two.result.lse);
    policy_.candidate_fraction = 0.02;
    EXPECT_NE(one.result.out, sequence_->Attend(policy_, q_).result.out);
  }
}

// For each stratum of the tail, the number of tokens that its rows stand for. Each row stands for
// n_h / r_h tokens.
std::map<int, double> TokensByStratum(const Selection& s) {
  std::map<int, double> tokens;
  for (size_t i = 0; i < s.indices.size(); ++i) {
    if (s.strata[i] >= kStratumTail) tokens[s.strata[i]] += std::exp(double{s.log_weights[i]});
  }
  return tokens;
}

// Expects that the rows of every stratum stand for a whole number of tokens, and all rows together
// for all tokens of the tail.
void ExpectCovers(const Selection& s, int64_t tail, const std::string& what) {
  double sum = 0;
  for (const auto& [stratum, tokens] : TokensByStratum(s)) {
    EXPECT_NEAR(tokens, std::round(tokens), 1e-5 * tokens + 1e-3) << what << " " << stratum;
    sum += tokens;
  }
  EXPECT_NEAR(sum, static_cast<double>(tail), 1e-5 * static_cast<double>(tail)) << what;
}

TEST_P(Stages, TheTailCoversWhatTheFirstDidNotFind) {
  PrepareAll();
  for (const Selector first : {Selector::kAsymmetric, Selector::kHamming, Selector::kQuest}) {
    SetStages(first, Selector::kInt4Keys);
    policy_.candidate_count = 500;
    policy_.heavy_kind = HeavyKind::kCount;
    for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
      policy_.tail = tail;
      const std::string what = Name(first);
      const JobItem select = sequence_->Select(policy_, q_);
      ExpectWeighted(context_, q_, policy_, /*promises=*/false, sequence_->Attend(policy_, q_),
                     select, what);
      const std::vector<Membership> found = [&] {
        kv_head_ = 0;
        return Candidates(first);
      }();
      const Selection& s = select.result.selections[0];
      ExpectCovers(s, end() - begin() - policy_.heavy_count, what);
      int64_t others = 0;
      for (size_t i = 0; i < s.indices.size(); ++i) {
        others += s.strata[i] >= kStratumTail && found[s.indices[i] - begin()] == Membership::kOut;
      }
      EXPECT_GT(others, 0) << what;
    }
  }
}

// With a heavy count of 0, only strays are heavy.
TEST_P(Stages, NoHeavySet) {
  PrepareAll();
  policy_.heavy_kind = HeavyKind::kCount;
  policy_.heavy_count = 0;
  int64_t strays = 0;
  for (const Tail tail : {Tail::kNone, Tail::kUniform, Tail::kStratified}) {
    policy_.tail = tail;
    for (const auto& [selector, ranks_bear] :
         {std::pair(Selector::kAsymmetric, true), std::pair(Selector::kHamming, false),
          std::pair(Selector::kQuest, false), std::pair(Selector::kOracle, true)}) {
      policy_.selector = selector;
      ASSERT_TRUE(Validate(policy_, spec_).empty());
      const JobItem select = sequence_->Select(policy_, q_);
      const std::string what = Name(selector) + " tail " + std::to_string(static_cast<int>(tail));
      ExpectWeighted(context_, q_, policy_, ranks_bear && tail != Tail::kNone,
                     sequence_->Attend(policy_, q_), select, what);
      for (kv_head_ = 0; kv_head_ < spec_.kv_head_count; ++kv_head_) {
        const Selection& s = select.result.selections[kv_head_];
        std::vector<int64_t> heavy;
        for (size_t i = 0; i < s.indices.size(); ++i) {
          if (s.strata[i] == kStratumHeavy) heavy.push_back(s.indices[i]);
        }
        EXPECT_EQ(heavy, Strays()) << what;
        const int64_t others = end() - begin() - static_cast<int64_t>(heavy.size());
        if (tail == Tail::kNone) {
          EXPECT_EQ(static_cast<int64_t>(s.indices.size()), kTokens - others) << what;
        } else {
          ExpectCovers(s, others, what);
        }
        strays += static_cast<int64_t>(heavy.size());
      }
    }
  }
  EXPECT_GT(strays, 0) << "choose another seed";
}

INSTANTIATE_TEST_SUITE_P(Devices, Stages, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
