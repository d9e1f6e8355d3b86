// How the page index affects selections and certificates: strays are read, and the adaptive heavy
// count follows from the error of the ranks.
#include "tests/reference/page_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/device_bench.h"
#include "tests/conformance/scored_end.h"
#include "tests/reference/codes.h"

namespace spillway {
namespace {

using reference::Context;

constexpr int kD = 64;
constexpr int kGroup = 2;
constexpr int64_t kTokens = 8192;
constexpr int64_t kScoredEnd = kTokens - 64;

class Pages : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  Pages()
      : spec_(MakeSpec(1, kGroup, kD, DType::kF32)),
        bench_(GetParam(), spec_),
        context_(reference::TraceContext(spec_, kTokens, 91)),
        q_(reference::TraceQueries(context_, 2, 92, 1.5)) {}

  // A vector of this length that is orthogonal to all queries.
  std::vector<double> Across(double length, uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    std::vector<std::vector<double>> axes;
    const int queries = static_cast<int>(q_.size()) / kD;
    for (int row = 0; row <= queries; ++row) {
      std::vector<double> x(kD);
      for (int i = 0; i < kD; ++i) x[i] = row < queries ? q_[row * kD + i] : normal(random);
      for (const std::vector<double>& axis : axes) {
        const double along = reference::Dot(x, axis);
        for (int i = 0; i < kD; ++i) x[i] -= along * axis[i];
      }
      const double norm = reference::Norm(x);
      for (double& e : x) e /= norm;
      axes.push_back(x);
    }
    for (double& e : axes.back()) e *= length;
    return axes.back();
  }
  void SetKey(int64_t token, const std::vector<double>& key) {
    for (int i = 0; i < kD; ++i) context_.k[token * kD + i] = static_cast<float>(key[i]);
  }
  // The heavy tokens in the selection of query t.
  static std::set<int64_t> HeavyOf(const JobItem& select, int t) {
    std::set<int64_t> heavy;
    const Selection& s = select.result.selections[t];
    for (size_t i = 0; i < s.indices.size(); ++i) {
      if (s.strata[i] == kStratumHeavy) heavy.insert(s.indices[i]);
    }
    return heavy;
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  Context context_;
  const std::vector<float> q_;  // two queries
};

// Whatever the policy, strays are heavy: here two keys about which a code says nothing, and a value
// 2^17 times as large as usual.
TEST_P(Pages, StraysAreInEverySelection) {
  SetKey(5000, Across(1e5, 1));
  SetKey(7100, Across(1e5, 2));
  for (int i = 0; i < kD; ++i) context_.v[6000 * kD + i] = std::ldexp(i % 2 == 0 ? 1 : -1, 18);
  const reference::PageIndex index = reference::PageIndex::Of(context_.Head(0));
  std::set<int64_t> strays;
  for (int64_t t = 64; t < kScoredEnd; ++t) {
    if (index.strays[t]) strays.insert(t);
  }
  for (const int64_t t : {5000, 6000, 7100}) ASSERT_EQ(strays.count(t), 1u) << t;
  BenchSequence sequence(bench_);
  ASSERT_TRUE(sequence.Append(context_, 0, kTokens).ok());
  for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
    for (const HeavyKind kind :
         {HeavyKind::kAdaptive, HeavyKind::kCount, HeavyKind::kFraction, HeavyKind::kMass}) {
      for (const Tail tail : {Tail::kStratified, Tail::kUniform, Tail::kNone}) {
        Policy policy = DefaultPolicy(spec_);
        policy.selector = selector;
        policy.heavy_kind = kind;
        policy.heavy_count = 0;
        policy.heavy_fraction = 0.01;
        policy.tail = tail;
        for (policy.seed = 0; policy.seed < 3; ++policy.seed) {
          const std::string what = "selector " + std::to_string(static_cast<int>(selector)) +
                                   " kind " + std::to_string(static_cast<int>(kind)) + " tail " +
                                   std::to_string(static_cast<int>(tail));
          const JobItem item = sequence.Select(policy, q_, {kTokens, kTokens});
          ASSERT_TRUE(item.status.ok()) << item.status;
          for (int t = 0; t < 2; ++t) {
            const std::set<int64_t> heavy = HeavyOf(item, t);
            EXPECT_TRUE(std::includes(heavy.begin(), heavy.end(), strays.begin(), strays.end()))
                << what;
            if (kind == HeavyKind::kCount) {
              EXPECT_EQ(heavy, strays) << what;
            }
          }
        }
      }
    }
  }
}

// Up to 1,024 strays are read besides the tokens that are heavy by rank. With more, nothing is
// promised.
TEST_P(Pages, MoreThan1024StraysTakeThePromise) {
  // The trace has a few strays already.
  int64_t own = 0;
  {
    const reference::PageIndex index = reference::PageIndex::Of(context_.Head(0));
    for (int64_t t = 64; t < kScoredEnd; ++t) own += index.strays[t];
  }
  ASSERT_LT(own, 100);
  for (const int64_t count : {1024, 1025, 1100}) {
    const Context plain = context_;
    // Only one key in six, so that the other keys determine what is usual in a page.
    int64_t planted = 0;
    for (int64_t t = 1024; planted < count - own; t += 6) {
      ASSERT_LT(t, kScoredEnd);
      SetKey(t, Across(1e4, t));
      ++planted;
    }
    const reference::PageIndex index = reference::PageIndex::Of(context_.Head(0));
    int64_t strays = 0;
    for (int64_t t = 64; t < kScoredEnd; ++t) strays += index.strays[t];
    // Some of the trace's own strays may have been replaced.
    for (int64_t t = 6000; strays < count; ++t) {
      if (index.strays[t]) continue;
      SetKey(t, Across(1e4, t));
      ++strays;
    }
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context_, 0, kTokens).ok());
    Policy policy = DefaultPolicy(spec_);
    policy.heavy_kind = HeavyKind::kCount;
    policy.heavy_count = 100;
    int64_t statistical = 0;
    for (policy.seed = 0; policy.seed < 3; ++policy.seed) {
      const JobItem item = sequence.Attend(policy, q_, {kTokens, kTokens});
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (const Certificate& c : item.result.certificates) {
        EXPECT_EQ(c.heavy_token_count, 1024 + 100);
        statistical += c.promise == Promise::kStatistical;
        if (count > 1024) {
          EXPECT_EQ(c.promise, Promise::kNone);
          EXPECT_EQ(c.relative_error, HUGE_VALF);
        }
      }
    }
    if (count == 1024) {
      EXPECT_GT(statistical, 6);
    }
    // vAttention's lemmas do not rest on ranks.
    policy.tail = Tail::kUniform;
    policy.bound = Bound::kPaper;
    policy.epsilon = 0.5;
    const JobItem paper = sequence.Attend(policy, q_, {kTokens, kTokens});
    ASSERT_TRUE(paper.status.ok()) << paper.status;
    for (const Certificate& c : paper.result.certificates) {
      EXPECT_TRUE(std::isfinite(c.relative_error));
    }
    context_ = plain;
  }
}

// The rows of a limit go to strays first. An adaptive count leaves half of the rest to the tail.
TEST_P(Pages, ALimitIsKeptWithStraysAndAnAdaptiveCount) {
  constexpr int kStrays = 300;
  for (int i = 0; i < kStrays; ++i) SetKey(1100 + 20 * i, Across(1e4, i));
  const reference::PageIndex index = reference::PageIndex::Of(context_.Head(0));
  int64_t strays = 0;
  for (int64_t t = 64; t < kScoredEnd; ++t) strays += index.strays[t];
  ASSERT_GE(strays, kStrays);
  BenchSequence sequence(bench_);
  ASSERT_TRUE(sequence.Append(context_, 0, kTokens).ok());
  for (const Tail tail : {Tail::kStratified, Tail::kUniform, Tail::kNone}) {
    Policy policy = DefaultPolicy(spec_);
    policy.tail = tail;
    policy.epsilon = 0.02;
    const JobItem free = sequence.Attend(policy, q_, {kTokens, kTokens});
    ASSERT_TRUE(free.status.ok()) << free.status;
    for (const int64_t limit : {271, 300, 400, 430, 435, 440, 500, 560, 600, 700, 1000, 2000}) {
      policy.row_count_max = limit;
      ASSERT_TRUE(Validate(policy, spec_).empty());
      const JobItem item = sequence.Attend(policy, q_, {kTokens, kTokens});
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (int t = 0; t < 2; ++t) {
        EXPECT_LE(item.result.touched_row_counts[t], limit);
        const int64_t wanted = free.result.certificates[t * kGroup].heavy_token_count - strays;
        const int64_t left = limit - 128;
        const int64_t read = std::min(strays, left);
        const int64_t room = left - read;
        const int64_t ranked = std::min({wanted, std::max<int64_t>(room / 2, 64), room});
        for (int g = 0; g < kGroup; ++g) {
          const Certificate& c = item.result.certificates[t * kGroup + g];
          EXPECT_EQ(c.heavy_token_count, read + ranked) << "limit " << limit;
          if (read < strays) {
            EXPECT_EQ(c.promise, Promise::kNone) << "limit " << limit;
          }
        }
      }
    }
  }
}

// Keys as in models with biases: constants that the rotary embedding rotates with the position. The
// larger these are, the more they vary within a page.
TEST_P(Pages, AHeavyCountFollowsFromTheRanksError) {
  const std::vector<float> rotation = MakeRotation(kD, spec_.hash.seed, 0);
  const int bits = spec_.hash.bits_per_dim;
  std::set<int64_t> counts;
  int64_t compared = 0, beyond = 0;
  for (const double bias : {0.0, 20.0, 45.0, 70.0, 150.0, 300.0, 500.0}) {
    Context context = context_;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (const int channel : {13, 15, 17, 19}) {
        const double angle = static_cast<double>(t) * std::pow(10000.0, -2.0 * channel / kD);
        context.k[t * kD + channel] += static_cast<float>(bias * std::cos(angle));
        context.k[t * kD + channel + kD / 2] += static_cast<float>(bias * std::sin(angle));
      }
    }
    const reference::KeyValues kv = context.Head(0);
    const reference::PageIndex index = reference::PageIndex::Of(kv);
    std::vector<reference::RotationCode> codes;
    std::vector<int64_t> tokens;
    for (int64_t t = 64; t < kScoredEnd; ++t) {
      if (index.strays[t]) continue;
      tokens.push_back(t);
      codes.push_back(reference::EncodeRotated(kv.Key(t), index.CentreOf(t), rotation, bits));
    }
    const int64_t strays = kScoredEnd - 64 - static_cast<int64_t>(tokens.size());
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context, 0, kTokens).ok());
    const Policy policy = DefaultPolicy(spec_);
    const JobItem item = sequence.Attend(policy, q_, {kTokens, kTokens});
    ASSERT_TRUE(item.status.ok()) << item.status;
    for (int t = 0; t < 2; ++t) {
      std::vector<double> sigma;
      for (int g = 0; g < kGroup; ++g) {
        const std::vector<double> q = reference::Query(spec_, q_, t, g);
        const reference::QuantisedQuery query = reference::QuantiseQuery(q, rotation);
        std::vector<double> logits;
        for (size_t i = 0; i < tokens.size(); ++i) {
          logits.push_back(reference::AsymmetricLogit(codes[i], query, bits, spec_.softmax_scale) +
                           spec_.softmax_scale * reference::Dot(q, index.CentreOf(tokens[i])));
        }
        sigma.push_back(
            std::sqrt(reference::RankVariance(codes, logits, query, bits, spec_.softmax_scale)));
      }
      const double largest = *std::max_element(sigma.begin(), sigma.end());
      int64_t wanted = 64;
      bool near = false;
      for (const double edge : {1.0, 1.5, 2.5, 4.0}) {
        if (largest > edge) wanted *= 2;
        near |= std::fabs(largest / edge - 1) < 0.01;
      }
      for (int g = 0; g < kGroup; ++g) {
        const Certificate& c = item.result.certificates[t * kGroup + g];
        const std::string what = "bias " + std::to_string(bias) + ", sigma " +
                                 std::to_string(sigma[g]) + ", the group's " +
                                 std::to_string(largest);
        if (!near) {
          ++compared;
          EXPECT_EQ(c.heavy_token_count, wanted + strays) << what;
          counts.insert(wanted);
        }
        if (sigma[g] > 6.1 && c.promise != Promise::kExact) {
          ++beyond;
          EXPECT_EQ(c.promise, Promise::kNone) << what;
          EXPECT_EQ(c.relative_error, HUGE_VALF) << what;
        }
        if (sigma[g] < 5.9) {
          EXPECT_TRUE(std::isfinite(c.relative_error)) << what;
        }
      }
    }
  }
  EXPECT_EQ(counts, (std::set<int64_t>{64, 128, 256, 512, 1024})) << "choose other biases";
  EXPECT_GT(compared, 20);
  EXPECT_GT(beyond, 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, Pages, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
