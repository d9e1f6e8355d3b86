// Which rows a sparse attend samples from its tail, recomputed in fp64: those whose place in the
// step's sample order is below a threshold. The threshold follows from what the pilot says the
// bound needs, and, if the error is still too large, from all rows read so far.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "host/core/degrees.h"
#include "host/core/keyed_hash.h"
#include "tests/conformance/expect_weighted.h"
#include "tests/reference/page_index.h"
#include "tests/reference/ranking.h"
#include "tests/reference/tail.h"

namespace spillway {
namespace {

using reference::Context;
using reference::SampledTokens;

// Sampling thresholds, one per stratum.
using Thresholds = std::vector<uint64_t>;
constexpr uint64_t kAll = uint64_t{1} << 32;

class Budget : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 8192;
  static constexpr int kLayers = 2;
  static constexpr int kPilot = 48;
  // The first stratum has 64 tokens. A pilot of 48 reads all of them, a pilot of 16 does not.
  static constexpr int kHeavy = 64;

  Budget() : spec_(TwoLayers()), bench_(GetParam(), spec_), policy_(DefaultPolicy(spec_)) {
    policy_.heavy_kind = HeavyKind::kCount;
    policy_.heavy_count = kHeavy;
    policy_.pilot_token_count = kPilot;
    Prepare(reference::TraceContext(spec_, kTokens, 23));
    q_ = reference::TraceQueries(context_, 1, 24, 1.5);
  }

  // Appends the context to both layers.
  void Prepare(Context context) {
    context_ = std::move(context);
    sequence_.emplace(bench_);
    for (int l = 0; l < kLayers; ++l) {
      EXPECT_TRUE(sequence_->Append(context_, 0, kTokens, 0, l).ok());
    }
    kv_.clear();
    for (int h = 0; h < spec_.kv_head_count; ++h) kv_.push_back(context_.Head(h));
  }

  std::vector<double> LogitsOf(int h) const {
    return reference::Logits(kv_[h / spec_.group()], reference::Query(spec_, q_, 0, h),
                             spec_.softmax_scale, kTokens);
  }

  static ModelSpec TwoLayers() {
    ModelSpec spec = MakeSpec(2, 3, 64, DType::kF32);
    spec.layer_count = kLayers;
    return spec;
  }

  // The selection of each KV head.
  std::vector<SelectionParts> Select(const Policy& policy) {
    const JobItem item = sequence_->Select(policy, q_, {visible_}, layer_);
    EXPECT_TRUE(item.status.ok()) << item.status;
    std::vector<SelectionParts> parts;
    for (const Selection& s : item.result.selections) parts.push_back(SplitSelection(s));
    return parts;
  }

  // Every token of every stratum, by a pilot that takes them all.
  std::vector<SelectionParts> SelectAll(Policy policy) {
    policy.pilot_token_count = kTokens;
    policy.row_count_max = 0;
    const std::vector<SelectionParts> all = Select(policy);
    for (const SelectionParts& parts : all) {
      int64_t count = static_cast<int64_t>(parts.exact.size());
      for (const SampledTokens& s : parts.strata) count += static_cast<int64_t>(s.tokens.size());
      EXPECT_EQ(count, visible_);
    }
    return all;
  }

  SampleOrder Order(int kv_head) const {
    return MakeSampleOrder(policy_.seed, layer_, kv_head, visible_,
                           spec_.ResidentSample(policy_.seed));
  }

  // The tokens of a stratum whose place is below a threshold.
  static SampledTokens Below(const SampledTokens& all, const SampleOrder& order,
                             uint64_t threshold) {
    SampledTokens drawn;
    drawn.token_count = static_cast<int64_t>(all.tokens.size());
    for (const uint32_t t : all.tokens) {
      if (SamplePlace(order, t) < threshold) drawn.tokens.push_back(t);
    }
    return drawn;
  }

  // Pilots take at most half of the rows that row_count_max leaves. A stratum of at most two pilots
  // is read whole. While a threshold finds fewer than 8 tokens, it is doubled.
  Thresholds PilotThresholds(const SelectionParts& all, const SampleOrder& order) {
    int64_t pilot = policy_.pilot_token_count;
    if (policy_.row_count_max > 0) {
      const int64_t room = policy_.row_count_max - static_cast<int64_t>(all.exact.size());
      pilot = std::min(pilot, room / 2 / static_cast<int64_t>(all.strata.size()));
    }
    Thresholds thresholds;
    for (const SampledTokens& s : all.strata) {
      const int64_t n = s.token_count;
      uint64_t threshold = n <= 2 * pilot ? kAll : SampleThreshold(pilot, n);
      for (; threshold < kAll && Below(s, order, threshold).tokens.size() < 8; threshold *= 2) {
        ++widened_;
      }
      thresholds.push_back(threshold);
    }
    return thresholds;
  }

  // The rows that a draw asks for.
  struct Asked {
    std::vector<int64_t> rows;  // per stratum, the largest number over the query heads
    bool any = false;           // whether any head asks
    bool open = false;          // fp32 may put a head's error on the other side of epsilon
  };
  // What the next draw asks for, by the rows read so far. After the pilot, all query heads ask;
  // later, only heads whose error is known and above epsilon, with 1.25 times the deviations.
  Asked Wanted(int kv_head, const std::vector<uint32_t>& exact,
               const std::vector<SampledTokens>& drawn, bool is_pilot) {
    const double inflation = policy_.inflation * (is_pilot ? 1 : 1.25);
    Asked asked = {.rows = std::vector<int64_t>(drawn.size(), 0)};
    std::vector<double> signs(spec_.head_dim);
    for (int i = 0; i < spec_.head_dim; ++i) {
      signs[i] = ProjectionSigns::Of(policy_.seed).negative(i) ? -1 : 1;
    }
    for (int h = kv_head * spec_.group(); h < (kv_head + 1) * spec_.group(); ++h) {
      const reference::Estimate e =
          reference::EstimateOutput(kv_[kv_head], LogitsOf(h), exact, drawn, signs);
      const bool by_degrees = policy_.tail == Tail::kStratified || policy_.bound == Bound::kRatio;
      const double z = by_degrees ? reference::ErrorQuantile(e.degrees, policy_.delta)
                                  : reference::TwoSidedQuantile(policy_.delta);
      const double error = e.variance == 0 ? 0
                           : e.norm_sq_unbiased <= 0
                               ? HUGE_VAL
                               : z * std::sqrt(e.variance / e.norm_sq_unbiased);
      if (!is_pilot) {
        // This bound never promises anything, whatever the number of rows.
        if (policy_.tail == Tail::kUniform && policy_.bound == Bound::kDenominator) continue;
        asked.open |= std::fabs(error / policy_.epsilon - 1) < 0.01 || error > 1e3;
        if (error <= policy_.epsilon || error == HUGE_VAL) continue;
      }
      asked.any = true;
      const std::vector<int64_t> rows =
          policy_.tail == Tail::kUniform
              ? std::vector<int64_t>{reference::UniformRows(policy_.bound, e, drawn[0].token_count,
                                                            inflation, policy_.epsilon,
                                                            policy_.delta)}
              : reference::StratifiedRows(e, drawn, inflation, policy_.epsilon, policy_.delta);
      for (size_t s = 0; s < rows.size(); ++s) {
        const auto least = static_cast<int64_t>(drawn[s].tokens.size());
        heads_differ_ += asked.rows[s] > least && rows[s] > least && asked.rows[s] != rows[s];
        asked.rows[s] = std::max({asked.rows[s], rows[s], least});
      }
    }
    return asked;
  }

  // Compares the rows drawn with those expected. tolerance: the share by which fp32 sums may change
  // a budget, besides rounding.
  void ExpectDrawn(const std::string& what, double tolerance = 1e-3) {
    ASSERT_TRUE(Validate(policy_, spec_).empty()) << what;
    const std::vector<SelectionParts> all = SelectAll(policy_), got = Select(policy_);
    for (int h = 0; h < spec_.kv_head_count; ++h) {
      const SampleOrder order = Order(h);
      const Thresholds first = PilotThresholds(all[h], order);
      std::vector<SampledTokens> pilot;
      for (size_t s = 0; s < first.size(); ++s) {
        pilot.push_back(Below(all[h].strata[s], order, first[s]));
      }
      std::vector<int64_t> wanted = Wanted(h, all[h].exact, pilot, /*is_pilot=*/true).rows;
      std::vector<SampledTokens> second;
      for (size_t s = 0; s < first.size(); ++s) {
        const uint64_t threshold = SampleThreshold(wanted[s], pilot[s].token_count);
        second.push_back(Below(all[h].strata[s], order, std::max(first[s], threshold)));
      }
      const Asked third = Wanted(h, all[h].exact, second, /*is_pilot=*/false);
      if (third.open) continue;
      // One row more or less in the second draw changes what the third draw asks for.
      const double share = third.any ? std::max(tolerance, 0.03) : tolerance;
      for (size_t s = 0; s < first.size() && third.any; ++s) {
        wanted[s] = std::max(wanted[s], third.rows[s]);
      }
      third_draws_ += third.any;
      ++compared_;
      ASSERT_EQ(got[h].strata.size(), wanted.size()) << what;
      EXPECT_EQ(got[h].exact, all[h].exact) << what;
      for (size_t s = 0; s < wanted.size(); ++s) {
        const std::string where = what + ", seed " + std::to_string(policy_.seed) + ", KV head " +
                                  std::to_string(h) + ", stratum " + std::to_string(s) +
                                  ": wanted " + std::to_string(wanted[s]) + " of " +
                                  std::to_string(pilot[s].token_count) + ", drawn " +
                                  std::to_string(got[h].strata[s].tokens.size());
        EXPECT_EQ(got[h].strata[s].token_count, pilot[s].token_count) << where;
        const int64_t slack = 1 + static_cast<int64_t>(share * static_cast<double>(wanted[s]));
        const auto with = [&](int64_t rows) {
          const uint64_t threshold =
              std::max(first[s], SampleThreshold(rows, pilot[s].token_count));
          return Below(all[h].strata[s], order, threshold).tokens;
        };
        const std::vector<uint32_t>& drawn = got[h].strata[s].tokens;
        const std::vector<uint32_t> least = with(wanted[s] - slack), most = with(wanted[s] + slack);
        EXPECT_TRUE(std::includes(drawn.begin(), drawn.end(), least.begin(), least.end())) << where;
        EXPECT_TRUE(std::includes(most.begin(), most.end(), drawn.begin(), drawn.end())) << where;
        rows_after_pilot_ += static_cast<int64_t>(least.size() - pilot[s].tokens.size());
        rows_left_ += pilot[s].token_count - static_cast<int64_t>(most.size());
      }
    }
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  Policy policy_;
  Context context_;
  std::vector<float> q_;
  std::optional<BenchSequence> sequence_;
  int layer_ = 0;
  int64_t visible_ = kTokens;
  std::vector<reference::KeyValues> kv_;
  // Counts, to check that the cases of interest occurred.
  int64_t compared_ = 0;
  int64_t third_draws_ = 0;
  int64_t widened_ = 0;
  int64_t heads_differ_ = 0;
  int64_t rows_after_pilot_ = 0;
  int64_t rows_left_ = 0;
  int64_t strays_ = 0;
};

TEST_P(Budget, DrawsWhatTheBoundAsksFor) {
  struct Case {
    const char* name;
    Tail tail;
    Bound bound;
    double epsilon, delta, inflation;
  };
  constexpr Tail kStratified = Tail::kStratified, kUniform = Tail::kUniform;
  constexpr Bound kDenominator = Bound::kDenominator, kPaper = Bound::kPaper,
                  kRatio = Bound::kRatio;
  for (const Case& c : {Case{"stratified", kStratified, kRatio, 0.04, 0.1, 1.25},
                        Case{"stratified, inflated", kStratified, kRatio, 0.1, 0.2, 3},
                        Case{"stratified, more", kStratified, kRatio, 0.02, 0.05, 1},
                        Case{"ratio", kUniform, kRatio, 0.1, 0.1, 1.25},
                        Case{"ratio, inflated", kUniform, kRatio, 0.4, 0.05, 3},
                        Case{"paper", kUniform, kPaper, 0.8, 0.1, 1.25},
                        Case{"paper, inflated", kUniform, kPaper, 0.9, 0.2, 2},
                        Case{"denominator", kUniform, kDenominator, 0.1, 0.1, 1.25},
                        Case{"denominator, inflated", kUniform, kDenominator, 0.3, 0.3, 2}}) {
    policy_.tail = c.tail;
    policy_.bound = c.bound;
    policy_.epsilon = c.epsilon;
    policy_.delta = c.delta;
    policy_.inflation = c.inflation;
    heads_differ_ = rows_after_pilot_ = rows_left_ = compared_ = 0;
    for (policy_.seed = 0; policy_.seed < 20; ++policy_.seed) {
      layer_ = policy_.seed % 3 == 1;
      visible_ = kTokens - static_cast<int64_t>(policy_.seed % 4) * 7;
      ExpectDrawn(c.name);
    }
    // Budgets lie between the pilot and all rows, and differ between query heads.
    EXPECT_GT(rows_after_pilot_, 20 * kPilot) << c.name;
    EXPECT_GT(rows_left_, 20 * kTokens / 10) << c.name;
    EXPECT_GT(heads_differ_, 10) << c.name;
    EXPECT_GT(compared_, 30) << c.name;
  }
  EXPECT_GT(third_draws_, 10);
}

// A pilot of 16 sometimes finds fewer than 8 tokens of a stratum.
TEST_P(Budget, APilotThatFindsFewIsWidened) {
  policy_.pilot_token_count = 16;
  for (policy_.seed = 1; policy_.seed < 60; ++policy_.seed) ExpectDrawn("pilot of 16");
  EXPECT_GT(widened_, 0);
}

// If the output cannot be distinguished from 0, a relative error asks for every row, also of a
// stratum in which no deviation was seen.
TEST_P(Budget, AnOutputOfNoKnownNormAsksForAll) {
  // 13 of 100 tokens have a logit other than 0 (one of eleven) and a value vector in any direction.
  // They fill the strata up to rank 1,024. The tokens of the last stratum have neither.
  Context context = context_;
  for (int64_t t = 0; t < spec_.kv_head_count * kTokens; ++t) {
    const bool some = t * 13 % 100 < 13;
    for (int i = 0; i < spec_.head_dim; ++i) {
      const int64_t at = t * spec_.head_dim + i;
      context.k[at] = some && i == 0 ? 1 + static_cast<float>(t * 37 % 11) / 11 : 0;
      // Elements that no query sees, so that no key is a stray.
      if (i > 0) context.k[at] = (t * 7 + i * t % 19) % 2 == 0 ? 1.0f : -1.0f;
      context.v[at] = some ? static_cast<float>((t * 31 + i * t % 17) % 13 - 6) : 0;
    }
  }
  for (size_t i = 0; i < q_.size(); ++i) q_[i] = i % spec_.head_dim == 0 ? 16 : 0;
  Prepare(std::move(context));
  policy_.selector = Selector::kOracle;
  policy_.epsilon = 0.5;
  int64_t exact = 0, others = 0;
  for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
    policy_.tail = tail;
    for (policy_.seed = 0; policy_.seed < 20; ++policy_.seed) {
      // Sums that nearly cancel lose digits.
      ExpectDrawn("no norm", 0.02);
      const JobItem item = sequence_->Attend(policy_, q_, {visible_}, layer_);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (const int64_t touched : item.result.touched_row_counts) {
        ++(touched == visible_ ? exact : others);
      }
    }
  }
  EXPECT_GT(exact, 0);
  EXPECT_GT(others, 0);
}

// If the limit leaves fewer than 16 rows per stratum, the tail becomes one stratum. A smaller pilot
// leaves half of the rows for later draws.
TEST_P(Budget, StrataAndPilotsFitBelowTheLimit) {
  policy_.epsilon = 0.9;
  for (const int each : {16, 25, 40}) {
    for (policy_.seed = 1; policy_.seed < 10; ++policy_.seed) {
      const std::vector<SelectionParts> all = SelectAll(policy_);
      const size_t strata = all[0].strata.size();
      ASSERT_EQ(all[1].strata.size(), strata) << "choose other data";
      ASSERT_GT(strata, 4u);
      // The KV heads differ in their number of strays.
      policy_.row_count_max =
          static_cast<int64_t>(std::max(all[0].exact.size(), all[1].exact.size()) + each * strata);
      if (each > 16) ExpectDrawn("room for " + std::to_string(each) + " of each stratum");
      for (const SelectionParts& parts : Select(policy_)) EXPECT_EQ(parts.strata.size(), strata);
      for (int h = 0; h < spec_.kv_head_count; ++h) {
        policy_.row_count_max = static_cast<int64_t>(all[h].exact.size() + 16 * strata);
        EXPECT_EQ(Select(policy_)[h].strata.size(), strata);
        policy_.row_count_max -= 1;
        EXPECT_EQ(Select(policy_)[h].strata.size(), 1u);
      }
    }
  }
}

// Strata hold the ranks (k, 2k], (2k, 4k], ... by the group's scores, with k heavy tokens.
TEST_P(Budget, StrataAreCutByRank) {
  policy_.selector = Selector::kOracle;
  for (const int64_t heavy : {40, 256, 1000}) {
    policy_.heavy_count = heavy;
    const std::vector<SelectionParts> all = SelectAll(policy_);
    const int64_t begin = policy_.sink_token_count;
    const int64_t end = reference::ScoredEndByPages(visible_, policy_.window_token_count);
    for (int h = 0; h < spec_.kv_head_count; ++h) {
      const reference::PageIndex index = reference::PageIndex::Of(kv_[h]);
      std::vector<std::vector<double>> logits;
      for (int g = 0; g < spec_.group(); ++g) logits.push_back(LogitsOf(h * spec_.group() + g));
      std::vector<int> bins;
      for (const double s : reference::GroupScores(logits, begin, end)) {
        const int bin = reference::ScoreBin(s);
        bins.push_back(index.Weigh({bin, bin}, begin + static_cast<int64_t>(bins.size())).low);
      }
      // Strays are heavy in addition to the count.
      const int64_t strays = std::count(bins.begin(), bins.end(), 4095);
      strays_ += strays;
      const std::vector<int64_t> chosen = reference::ExactTopK(bins, heavy + strays);
      std::vector<int> tail_bins;
      std::vector<uint32_t> tail;
      for (int64_t i = 0; i < end - begin; ++i) {
        if (std::binary_search(chosen.begin(), chosen.end(), i)) continue;
        tail.push_back(static_cast<uint32_t>(begin + i));
        tail_bins.push_back(bins[i]);
      }
      const std::vector<int> wanted = reference::CutIntoStrata(tail_bins, heavy);
      ASSERT_EQ(all[h].strata.size(), 1 + *std::max_element(wanted.begin(), wanted.end()));
      int64_t differing = 0;
      for (size_t i = 0; i < tail.size(); ++i) {
        const std::vector<uint32_t>& tokens = all[h].strata[wanted[i]].tokens;
        differing += !std::binary_search(tokens.begin(), tokens.end(), tail[i]);
      }
      // fp32 may put a token whose score is close to a bin's border into either bin.
      EXPECT_LE(differing, 10) << "heavy " << heavy << " KV head " << h;
    }
  }
  EXPECT_GT(strays_, 0) << "choose other data";
}

INSTANTIATE_TEST_SUITE_P(Devices, Budget, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
