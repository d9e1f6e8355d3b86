// Which certificates carry a promise: a table of cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/conformance/method_models.h"
#include "tests/statistics/proportion.h"

namespace spillway {
namespace {

using reference::Context;

// Keys that differ only at random, except in dimension 0, along which all queries lie: one key in
// 120 is 1 there. These tokens hold most of the mass of every output, but matching bits cannot
// distinguish them from the others.
class UnrankedKeys : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 6000;
  static constexpr int kD = 64;
  static constexpr int kHeavyEvery = 120;
  static constexpr float kHeavyLogit = 6;
  static constexpr float kLength = 4;  // scale of a key's other elements
  static constexpr int kAttends = 100;

  UnrankedKeys()
      : model_(2, 2, kD, DType::kF32, {.int4_keys = true},
               {.kind = HashKind::kRotation, .bits_per_dim = 3}),
        spec_(model_.spec),
        bench_(GetParam(), spec_, 0, model_.file),
        context_{spec_, kTokens, {}, {}},
        q_(spec_.query_head_count * kD, 0.0f),
        sequence_(bench_) {
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    for (int64_t t = 0; t < spec_.kv_head_count * kTokens; ++t) {
      const bool heavy = random() % kHeavyEvery == 0;
      for (int i = 0; i < kD; ++i) {
        context_.k.push_back(i == 0 ? static_cast<float>(heavy) : kLength * normal(random));
        context_.v.push_back(0.02f * normal(random) + static_cast<float>(i == (heavy ? 1 : 2)));
      }
    }
    for (int h = 0; h < spec_.query_head_count; ++h) {
      q_[h * kD] = kHeavyLogit / static_cast<float>(spec_.softmax_scale);
      exact_.push_back(reference::DenseAttention(context_.Head(h / spec_.group()),
                                                 reference::Query(spec_, q_, 0, h),
                                                 spec_.softmax_scale, kTokens));
    }
    EXPECT_TRUE(sequence_.Append(context_, 0, kTokens).ok());
  }

  struct Counts {
    int64_t certificates = 0;
    int64_t beyond = 0;    // errors beyond epsilon
    int64_t promised = 0;  // certificates that say STATISTICAL
    int64_t broken = 0;    // of those, errors beyond epsilon
  };
  // Counts over kAttends seeds and four query heads.
  Counts Count(Policy policy, bool audited = false) {
    EXPECT_TRUE(Validate(policy, spec_).empty());
    Counts counts;
    for (policy.seed = 0; policy.seed < kAttends; ++policy.seed) {
      JobItem item = sequence_.AttendItem(policy, q_, /*select_only=*/false);
      item.attend->audited = audited;
      item = sequence_.RunOne(std::move(item));
      EXPECT_TRUE(item.status.ok()) << item.status;
      for (int h = 0; h < spec_.query_head_count; ++h) {
        const bool beyond = reference::RelativeDistance(OutputOf(spec_, item.result, 0, h),
                                                        exact_[h].out) > policy.epsilon;
        const bool promised = item.result.certificates[h].promise == Promise::kStatistical;
        ++counts.certificates;
        counts.beyond += beyond;
        counts.promised += promised;
        counts.broken += promised && beyond;
      }
    }
    return counts;
  }

  const IndexedModel model_;
  const ModelSpec& spec_;
  DeviceBench bench_;
  Context context_;
  std::vector<float> q_;
  std::vector<reference::Attention> exact_;
  BenchSequence sequence_;
};

// Tokens that a first selection misses have no rank, however good the ranks of the others are.
// vAttention's lemmas do not need ranks: their sample is drawn from the whole tail, found or not.
TEST_P(UnrankedKeys, AFirstSelectionBearsNoPromise) {
  struct Case {
    const char* name;
    std::optional<Selector> first;
    Selector selector;
    Tail tail;
    Bound bound;
    bool promises;
  };
  constexpr Selector kHamming = Selector::kHamming, kOracle = Selector::kOracle,
                     kAsymmetric = Selector::kAsymmetric, kInt4Keys = Selector::kInt4Keys;
  constexpr Tail kStratified = Tail::kStratified, kUniform = Tail::kUniform;
  const std::vector<Case> cases = {
      {"oracle", {}, kOracle, kStratified, Bound::kRatio, true},
      {"oracle, uniform", {}, kOracle, kUniform, Bound::kRatio, true},
      {"oracle, lemmas", {}, kOracle, kUniform, Bound::kPaper, true},
      {"oracle of hamming's", kHamming, kOracle, kStratified, Bound::kRatio, false},
      {"oracle of hamming's, uniform", kHamming, kOracle, kUniform, Bound::kRatio, false},
      {"oracle of hamming's, lemmas", kHamming, kOracle, kUniform, Bound::kPaper, true},
      {"asymmetric of hamming's", kHamming, kAsymmetric, kStratified, Bound::kRatio, false},
      {"asymmetric of hamming's, uniform", kHamming, kAsymmetric, kUniform, Bound::kRatio, false},
      {"asymmetric of hamming's, lemmas", kHamming, kAsymmetric, kUniform, Bound::kPaper, true},
      {"int4 keys of hamming's", kHamming, kInt4Keys, kStratified, Bound::kRatio, false},
      {"int4 keys of hamming's, uniform", kHamming, kInt4Keys, kUniform, Bound::kRatio, false},
      {"oracle of asymmetric's", kAsymmetric, kOracle, kStratified, Bound::kRatio, false},
      {"asymmetric of the oracle's", kOracle, kAsymmetric, kStratified, Bound::kRatio, false},
  };
  for (const Case& c : cases) {
    Policy policy = DefaultPolicy(spec_);
    policy.selector = c.selector;
    policy.candidate_selector = c.first;
    policy.candidate_fraction = 0.01;
    policy.tail = c.tail;
    policy.bound = c.bound;
    if (!IsBuilt(policy)) continue;
    const Counts counts = Count(policy);
    ASSERT_EQ(counts.certificates, 4 * kAttends);
    if (!c.promises) {
      EXPECT_EQ(counts.promised, 0) << c.name << ": " << counts.broken << " of them broken";
      // An audited attend may promise whatever the ranks: most estimates are within epsilon.
      EXPECT_GT(Count(policy, /*audited=*/true).promised, counts.certificates / 2) << c.name;
    } else {
      EXPECT_GT(counts.promised, counts.certificates / 2) << c.name;
    }
    if (!c.first.has_value()) {
      EXPECT_EQ(counts.broken, 0) << c.name;
    }
    // There must be errors beyond epsilon, otherwise no promise could be wrong.
    if (c.first == kHamming) {
      EXPECT_GT(WilsonInterval(counts.beyond, counts.certificates).low, policy.delta) << c.name;
    }
  }
}

class Promises : public ::testing::TestWithParam<DeviceFactory> {};

// A limit that takes rows away also takes the promise away, even if the rows that are left would
// suffice: budgets are inflated, so less than half of the rows bring the estimate within epsilon.
TEST_P(Promises, ALimitThatBindsTakesThemAway) {
  const ModelSpec spec = MakeSpec(2, 2, 64, DType::kF32);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 8192, 41);
  const std::vector<float> q = reference::TraceQueries(context, 1, 42, 1.5);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
  for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
    Policy policy = DefaultPolicy(spec);
    policy.tail = tail;
    policy.inflation = 3;
    int64_t bound = 0, within = 0, just_bound = 0;
    for (policy.seed = 1; policy.seed < 9; ++policy.seed) {
      policy.row_count_max = 0;
      const JobItem free = sequence.Attend(policy, q);
      ASSERT_TRUE(free.status.ok()) << free.status;
      const std::vector<int64_t>& wanted = free.result.touched_row_counts;
      const int64_t most = *std::max_element(wanted.begin(), wanted.end());
      // In small steps near `wanted`, where the draw has a few rows more than its budget.
      std::vector<int64_t> limits;
      for (int64_t limit = 1200; limit < most; limit += limit / 10) limits.push_back(limit);
      for (const int64_t rows : wanted) {
        for (int64_t less = 0; less < 90; less += 3) limits.push_back(rows - less);
      }
      for (const int64_t limit : limits) {
        policy.row_count_max = limit;
        ASSERT_TRUE(Validate(policy, spec).empty()) << limit;
        const JobItem item = sequence.Attend(policy, q);
        ASSERT_TRUE(item.status.ok()) << item.status;
        for (int h = 0; h < spec.query_head_count; ++h) {
          const int kv_head = h / spec.group();
          const Certificate& c = item.result.certificates[h];
          ASSERT_EQ(free.result.certificates[h].promise, Promise::kStatistical);
          ASSERT_LE(item.result.touched_row_counts[kv_head], limit);
          // A budget may be larger than its draw. A limit between the two binds.
          if (limit >= wanted[kv_head] &&
              item.result.touched_row_counts[kv_head] == wanted[kv_head]) {
            continue;
          }
          EXPECT_EQ(c.promise, Promise::kNone)
              << "limit " << limit << ", wanted " << wanted[kv_head];
          ++bound;
          within += c.relative_error <= policy.epsilon;
          just_bound += limit + 90 > wanted[kv_head];
        }
      }
    }
    // Otherwise the test could not tell these limits from errors beyond epsilon.
    EXPECT_GT(within, bound / 2);
    EXPECT_GT(just_bound, 0);
  }
}

// Codes of 2 bits per dimension carry a promise for up to 65,536 visible tokens per query, whatever
// the other queries of the attend see.
TEST_P(Promises, EndWhereRanksWereNotFoundToBearThem) {
  const ModelSpec spec =
      MakeSpec(1, 1, 64, DType::kBF16, {.kind = HashKind::kRotation, .bits_per_dim = 2});
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 65537, 43);
  const std::vector<float> q = reference::TraceQueries(context, 4, 44, 1.5);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
  Policy policy = DefaultPolicy(spec);
  policy.epsilon = 0.2;
  const std::vector<int64_t> visible = {65536, 65537, 65535, 65537};
  const JobItem item = sequence.Attend(policy, q, visible);
  ASSERT_TRUE(item.status.ok()) << item.status;
  for (size_t t = 0; t < visible.size(); ++t) {
    const Certificate& c = item.result.certificates[t];
    ASSERT_LE(c.relative_error, policy.epsilon);
    EXPECT_EQ(c.promise, visible[t] <= 65536 ? Promise::kStatistical : Promise::kNone)
        << visible[t];
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, UnrankedKeys, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Devices, Promises, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
