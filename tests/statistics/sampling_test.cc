// Sampling by the keyed hash: unbiased sums at fixed budgets, nested samples, no correlation
// between layers, steps and KV heads, and Neyman allotment compared with uniform sampling.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "host/core/keyed_hash.h"
#include "host/core/neyman.h"
#include "tests/reference/ranking.h"
#include "tests/reference/tail.h"
#include "tests/statistics/experiment.h"
#include "tests/statistics/proportion.h"

namespace spillway {
namespace {

using reference::SampledTokens;

// The tail of one query head with oracle ranks: 256 heavy tokens, strata by rank.
struct TailData {
  reference::KeyValues kv;
  std::vector<double> logits;
  std::vector<double> o;
  double max = 0;
  std::vector<SampledTokens> strata;  // all tokens of each
};

TailData MakeTail(bool stratified) {
  const ModelSpec spec = MakeSpec(1, 1, 64, DType::kF32);
  const reference::Context context = reference::TraceContext(spec, 8192, 91);
  const std::vector<float> q = reference::TraceQueries(context, 1, 92, 1.5);
  TailData data;
  data.kv = context.Head(0);
  data.logits =
      reference::Logits(data.kv, reference::Query(spec, q, 0, 0), spec.softmax_scale, context.n);
  data.o = reference::DenseAttention(data.kv, reference::Query(spec, q, 0, 0), spec.softmax_scale,
                                     context.n)
               .out;
  data.max = *std::max_element(data.logits.begin(), data.logits.end());
  std::vector<int> bins;
  for (double s : reference::HeadScores(data.logits, 0, context.n)) {
    bins.push_back(reference::ScoreBin(s));
  }
  const std::vector<int64_t> heavy = reference::ExactTopK(bins, 256);
  const std::set<int64_t> heavy_set(heavy.begin(), heavy.end());
  std::vector<int> tail_bins;
  std::vector<uint32_t> tail;
  for (int64_t t = 0; t < context.n; ++t) {
    if (heavy_set.count(t) > 0) continue;
    tail.push_back(static_cast<uint32_t>(t));
    tail_bins.push_back(bins[t]);
  }
  const std::vector<int> stratum = reference::CutIntoStrata(tail_bins, 256);
  data.strata.resize(stratified ? 1 + *std::max_element(stratum.begin(), stratum.end()) : 1);
  for (size_t i = 0; i < tail.size(); ++i) {
    SampledTokens& s = data.strata[stratified ? stratum[i] : 0];
    s.tokens.push_back(tail[i]);
    ++s.token_count;
  }
  return data;
}

// Tokens of a stratum that the hash samples, about `wanted` of them.
std::vector<uint32_t> Draw(const SampledTokens& stratum, uint64_t seed, int layer, int kv_head,
                           int64_t n, int64_t wanted) {
  const SampleOrder order = MakeSampleOrder(seed, layer, kv_head, n);
  const uint64_t threshold = SampleThreshold(wanted, stratum.token_count);
  std::vector<uint32_t> drawn;
  for (uint32_t t : stratum.tokens) {
    if (SamplePlace(order, t) < threshold) drawn.push_back(t);
  }
  return drawn;
}

// The mean of a number over draws, and its standard error.
struct Mean {
  double sum = 0, square = 0;
  int64_t count = 0;
  void Add(double x) {
    sum += x;
    square += x * x;
    ++count;
  }
  double mean() const { return sum / count; }
  double error() const { return std::sqrt((square / count - mean() * mean()) / count); }
};

class FixedBudget : public ::testing::TestWithParam<bool> {};

TEST_P(FixedBudget, NumeratorAndDenominatorAreUnbiased) {
  const TailData data = MakeTail(GetParam());
  const int d = data.kv.d;
  const int64_t wanted = GetParam() ? 40 : 250;
  double true_d = 0;
  std::vector<double> true_n(d);
  for (const SampledTokens& s : data.strata) {
    for (uint32_t t : s.tokens) {
      const double x = std::exp(data.logits[t] - data.max);
      true_d += x;
      for (int i = 0; i < d; ++i) true_n[i] += x * data.kv.Value(t)[i];
    }
  }
  Mean denominator;
  std::vector<Mean> numerator(d);
  const int draws = 6000 / kDrawsDivisor;
  for (int seed = 0; seed < draws; ++seed) {
    double dn = 0;
    std::vector<double> nn(d, 0.0);
    for (const SampledTokens& s : data.strata) {
      const std::vector<uint32_t> drawn = Draw(s, seed, 3, 1, 8192, wanted);
      ASSERT_GE(drawn.size(), 8u);
      const double weight = static_cast<double>(s.token_count) / static_cast<double>(drawn.size());
      for (uint32_t t : drawn) {
        const double x = weight * std::exp(data.logits[t] - data.max);
        dn += x;
        for (int i = 0; i < d; ++i) nn[i] += x * data.kv.Value(t)[i];
      }
    }
    denominator.Add(dn);
    for (int i = 0; i < d; ++i) numerator[i].Add(nn[i]);
  }
  // 4.5 standard errors: exceeded by chance once in 150,000 tests, for each of 65 numbers.
  EXPECT_NEAR(denominator.mean(), true_d, 4.5 * denominator.error());
  for (int i = 0; i < d; ++i) {
    EXPECT_NEAR(numerator[i].mean(), true_n[i], 4.5 * numerator[i].error()) << "dimension " << i;
  }
  // The test can detect a bias of 2 % of the sum, as from a wrong or stale weight.
  EXPECT_LT(4.5 * denominator.error(), 0.02 * std::sqrt(kDrawsDivisor) * true_d);
}

INSTANTIATE_TEST_SUITE_P(Tails, FixedBudget, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "stratified" : "uniform"; });

TEST(Neyman, VarianceIsNotAboveUniformsAtTheSameRows) {
  const TailData tail = MakeTail(true);
  const TailData whole = MakeTail(false);
  std::vector<double> counts, deviations;
  std::vector<NeymanStratum> strata;
  for (const SampledTokens& s : tail.strata) {
    const double t = std::sqrt(
        reference::TwoPassMoments(tail.kv, tail.logits, tail.max, s.tokens, tail.o).trace_o);
    counts.push_back(static_cast<double>(s.token_count));
    deviations.push_back(t);
    strata.push_back({s.token_count, 16, t});
  }
  const SampledTokens& all = whole.strata[0];
  const double n = static_cast<double>(all.token_count);
  const double trace =
      reference::TwoPassMoments(whole.kv, whole.logits, whole.max, all.tokens, whole.o).trace_o;
  for (const double share : {0.02, 0.05, 0.1, 0.3, 0.7}) {
    // Neyman allotment reaches the variance of uniform sampling of this share with fewer rows.
    const double uniform = n * n * trace * (1 / (share * n) - 1 / n);
    std::vector<int64_t> rows(strata.size());
    NeymanAllot(strata, uniform, rows);
    const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    EXPECT_LE(reference::AllottedVariance(counts, deviations, rows), uniform * (1 + 1e-9));
    EXPECT_LT(static_cast<double>(total), share * n) << "share " << share;
    // The same comparison at the same number of rows.
    const double rate = static_cast<double>(total);
    EXPECT_LE(reference::AllottedVariance(counts, deviations, rows),
              n * n * trace * (1 / rate - 1 / n));
  }
}

TEST(Nesting, ALargerBudgetContainsASmallerOne) {
  const TailData data = MakeTail(false);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<uint32_t> before;
    for (const int64_t wanted : {16, 24, 48, 400, 2000, 5000, 7900, 7936}) {
      const std::vector<uint32_t> drawn = Draw(data.strata[0], seed, 0, 0, 8192, wanted);
      ASSERT_TRUE(std::includes(drawn.begin(), drawn.end(), before.begin(), before.end()));
      before = drawn;
    }
    ASSERT_EQ(before.size(), data.strata[0].tokens.size());
  }
}

TEST(Nesting, ASmallerEpsilonSelectsMoreOfTheSame) {
  Experiment e;
  for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
    Policy policy = DefaultPolicy(e.spec);
    policy.tail = tail;
    std::vector<std::vector<uint32_t>> before(e.kQueries * e.kKvHeads);
    int64_t rows_before = 0;
    for (const double epsilon : {0.2, 0.1, 0.05, 0.02}) {
      policy.epsilon = epsilon;
      const JobItem item = e.sequence.Select(policy, e.q, e.visible);
      ASSERT_TRUE(item.status.ok());
      int64_t rows = 0;
      for (size_t i = 0; i < before.size(); ++i) {
        const std::vector<uint32_t>& now = item.result.selections[i].indices;
        ASSERT_TRUE(std::includes(now.begin(), now.end(), before[i].begin(), before[i].end()));
        rows += static_cast<int64_t>(now.size());
        before[i] = now;
      }
      EXPECT_GT(rows, rows_before);
      rows_before = rows;
    }
  }
}

// The samples of two (layer, KV head, seed) share as many tokens as chance gives.
TEST(Independence, OfLayersHeadsAndSeeds) {
  constexpr uint32_t kTokens = 1 << 17;
  constexpr double kShare = 1.0 / 16;
  struct Source {
    std::string name;
    uint64_t seed;
    int layer;
    int kv_head;
    int64_t n;
  };
  std::vector<Source> sources = {{"base", 7, 4, 2, 8192}};
  for (int i = 1; i <= 6; ++i) {
    sources.push_back({"layer", 7, 4 + i, 2, 8192});
    sources.push_back({"head", 7, 4, 2 + i, 8192});
    sources.push_back({"seed", 7 + static_cast<uint64_t>(i), 4, 2, 8192});
  }
  // A careless key would repeat for swapped or shifted coordinates.
  sources.push_back({"swapped", 7, 2, 4, 8192});
  sources.push_back({"complement", ~uint64_t{7}, 4, 2, 8192});
  SampledTokens all;
  all.token_count = kTokens;
  all.tokens.resize(kTokens);
  std::iota(all.tokens.begin(), all.tokens.end(), 0u);
  std::vector<std::vector<uint32_t>> samples;
  for (const Source& s : sources) {
    samples.push_back(
        Draw(all, s.seed, s.layer, s.kv_head, s.n, static_cast<int64_t>(kShare * kTokens)));
  }
  for (size_t a = 0; a < samples.size(); ++a) {
    for (size_t b = a + 1; b < samples.size(); ++b) {
      std::vector<uint32_t> both;
      std::set_intersection(samples[a].begin(), samples[a].end(), samples[b].begin(),
                            samples[b].end(), std::back_inserter(both));
      const double pa = samples[a].size() / double{kTokens},
                   pb = samples[b].size() / double{kTokens};
      const double deviation = std::sqrt(kTokens * pa * pb * (1 - pa) * (1 - pb));
      EXPECT_NEAR(static_cast<double>(both.size()), kTokens * pa * pb, 5 * deviation)
          << sources[a].name << " " << a << " and " << sources[b].name << " " << b;
    }
  }
}

// Two steps of one (layer, KV head) are two windows of one hash, so a pair may share many tokens or
// none. Over many steps they share as many as chance gives, at any lag.
TEST(Independence, OfSteps) {
  constexpr uint32_t kTokens = 1 << 11;
  constexpr int kSteps = 4000 / kDrawsDivisor;
  constexpr double kShare = 1.0 / 16;
  SampledTokens all;
  all.token_count = kTokens;
  all.tokens.resize(kTokens);
  std::iota(all.tokens.begin(), all.tokens.end(), 0u);
  std::vector<std::vector<uint32_t>> samples;
  for (int step = 0; step < kSteps + 64; ++step) {
    samples.push_back(Draw(all, 7, 4, 2, 8192 + step, static_cast<int64_t>(kShare * kTokens)));
  }
  for (const int lag : {1, 2, 3, 16, 64}) {
    Mean shared;
    for (int step = 0; step < kSteps; ++step) {
      const auto &a = samples[step], &b = samples[step + lag];
      std::vector<uint32_t> both;
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
      shared.Add(static_cast<double>(both.size()) / kTokens);
    }
    EXPECT_NEAR(shared.mean(), kShare * kShare, 5 * shared.error()) << "lag " << lag;
  }
}

// Steps share a key and differ only by the phase, which slides along the hash. So over many steps
// every token is drawn equally often.
TEST(Independence, StepsVisitEveryTokenEqually) {
  constexpr uint32_t kTokens = 512;
  constexpr int kSteps = 20000 / kDrawsDivisor;
  constexpr double kShare = 0.125;
  SampledTokens all;
  all.token_count = kTokens;
  all.tokens.resize(kTokens);
  std::iota(all.tokens.begin(), all.tokens.end(), 0u);
  std::vector<int64_t> times(kTokens, 0);
  for (int step = 0; step < kSteps; ++step) {
    for (uint32_t t : Draw(all, 7, 4, 2, 8192 + step, static_cast<int64_t>(kShare * kTokens))) {
      ++times[t];
    }
  }
  const double deviation = std::sqrt(kSteps * kShare * (1 - kShare));
  for (uint32_t t = 0; t < kTokens; ++t) {
    EXPECT_NEAR(static_cast<double>(times[t]), kSteps * kShare, 5 * deviation) << "token " << t;
  }
}

}  // namespace
}  // namespace spillway
