#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "tests/conformance/method_models.h"

namespace spillway {
namespace {

using reference::Context;

class Adversarial : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  Adversarial()
      : model_(1, 2, 64, DType::kF32, EveryIndex(16)),
        spec_(model_.spec),
        bench_(GetParam(), spec_, 0, model_.file),
        sequence_(bench_),
        context_(reference::TraceContext(spec_, 4096, 61)),
        q_(reference::TraceQueries(context_, 1, 62, 1.5)) {}

  std::vector<std::pair<std::string, Policy>> Policies() const { return PoliciesOf(spec_); }
  // The policies that a model of this spec can serve.
  static std::vector<std::pair<std::string, Policy>> PoliciesOf(const ModelSpec& spec) {
    std::vector<std::pair<std::string, Policy>> policies;
    for (const auto& [selector, name] :
         {std::pair(Selector::kAll, "all"), std::pair(Selector::kAsymmetric, "asymmetric"),
          std::pair(Selector::kHamming, "hamming"), std::pair(Selector::kOracle, "oracle"),
          std::pair(Selector::kInt4Keys, "int4_keys"), std::pair(Selector::kQuest, "quest"),
          std::pair(Selector::kDoubleSparsity, "double sparsity")}) {
      Policy policy = DefaultPolicy(spec);
      policy.selector = selector;
      policies.push_back({name, policy});
      policy.tail = Tail::kUniform;
      policies.push_back({std::string(name) + " uniform", policy});
      if (selector == Selector::kHamming) continue;
      policy.heavy_kind = HeavyKind::kMass;
      policies.push_back({std::string(name) + " top-p", policy});
    }
    Policy staged = DefaultPolicy(spec);
    staged.selector = Selector::kInt4Keys;
    staged.candidate_selector = Selector::kQuest;
    policies.push_back({"two stages", staged});
    staged.heavy_kind = HeavyKind::kMass;
    policies.push_back({"two stages top-p", staged});
    std::erase_if(policies, [&](const auto& named) {
      return !IsBuilt(named.second) || !Validate(named.second, spec).empty();
    });
    return policies;
  }

  std::span<float> Key(int64_t t) { return {context_.k.data() + t * spec_.head_dim, 64}; }
  std::span<float> Value(int64_t t) { return {context_.v.data() + t * spec_.head_dim, 64}; }
  std::span<float> QueryOf(int h) { return {q_.data() + h * spec_.head_dim, 64}; }

  void ExpectFinite(const JobItem& item, const std::string& what) {
    ASSERT_TRUE(item.status.ok()) << what << ": " << item.status;
    for (float x : item.result.out) ASSERT_TRUE(std::isfinite(x)) << what;
    for (float x : item.result.lse) ASSERT_TRUE(std::isfinite(x)) << what;
  }

  // Expects that the certificates of one attend are true: EXACT, or an error of 0, means no error,
  // and an error above epsilon is not promised. Ranks that do not use the values' norms miss rare
  // large values, so the second check does not apply to them.
  void ExpectTrue(const Context& context, const JobItem& item, const Policy& policy,
                  const std::string& what) {
    for (int h = 0; h < context.spec.query_head_count; ++h) {
      const reference::Attention wanted = reference::DenseAttention(
          context.Head(h / context.spec.group()), reference::Query(context.spec, q_, 0, h),
          context.spec.softmax_scale, context.n);
      const double error =
          reference::RelativeDistance(OutputOf(context.spec, item.result, 0, h), wanted.out);
      const Certificate& c = item.result.certificates[h];
      if (c.promise == Promise::kExact || c.relative_error == 0) {
        EXPECT_LT(error, 1e-5) << what;
      }
      const bool knows_values =
          context.spec.hash.kind == HashKind::kRotation &&
          (policy.selector == Selector::kAsymmetric || policy.selector == Selector::kOracle);
      if (c.promise == Promise::kStatistical && knows_values) {
        EXPECT_LE(error, policy.epsilon) << what;
      }
    }
  }

  const IndexedModel model_;
  const ModelSpec& spec_;
  DeviceBench bench_;
  BenchSequence sequence_;
  Context context_;
  std::vector<float> q_;
};

// The sign of the key's logit differs between the two query heads.
TEST_P(Adversarial, OneKeyDominatesBy1e30) {
  // With size 2e9, the logit times log2(e) is beyond the range of fp32.
  for (const auto& [at, size] : {std::pair(10, 1.0f), std::pair(700, 1.0f), std::pair(2000, 1.0f),
                                 std::pair(4090, 1.0f), std::pair(2001, 2e9f)}) {
    for (int i = 0; i < 64; ++i) Key(at)[i] = 0;
    Key(at)[5] = 1e30f;
    QueryOf(0)[5] = size;
    QueryOf(1)[5] = -size;
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context_, 0, context_.n).ok());
    for (const auto& [name, policy] : Policies()) {
      const JobItem item = sequence.Attend(policy, q_);
      ExpectFinite(item, name);
      const JobItem select = sequence.Select(policy, q_);
      const std::vector<uint32_t>& rows = select.result.selections[0].indices;
      const bool found = std::find(rows.begin(), rows.end(), at) != rows.end();
      // Hamming ignores the lengths of keys, double sparsity some channels. The others must find
      // the key.
      if (policy.selector != Selector::kHamming && policy.selector != Selector::kDoubleSparsity) {
        EXPECT_TRUE(found) << name << " at " << at;
      }
      if (!found) continue;
      for (int i = 0; i < 64; ++i) {
        ASSERT_FLOAT_EQ(OutputOf(spec_, item.result, 0, 0)[i], Value(at)[i]) << name;
      }
      EXPECT_NEAR(item.result.lse[0] / (1e30 * size * spec_.softmax_scale), 1, 1e-5) << name;
    }
    context_ = reference::TraceContext(spec_, 4096, 61);
  }
}

TEST_P(Adversarial, AllKeysEqual) {
  for (int64_t t = 1; t < context_.n; ++t) std::copy_n(Key(0).begin(), 64, Key(t).begin());
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    const JobItem item = sequence_.Attend(policy, q_);
    ExpectFinite(item, name);
    const reference::Attention wanted = reference::DenseAttention(
        context_.Head(0), reference::Query(spec_, q_, 0, 0), spec_.softmax_scale, context_.n);
    // All tokens have the same weight; ties go to the most recent tokens.
    EXPECT_NEAR(item.result.lse[0], wanted.lse, 1e-3) << name;
    const double error =
        reference::RelativeDistance(OutputOf(spec_, item.result, 0, 0), wanted.out);
    EXPECT_LT(error, policy.selector == Selector::kAll ? 1e-5 : 0.2) << name;
    if (policy.heavy_kind != HeavyKind::kCount || policy.selector == Selector::kAll) continue;
    const Selection s = sequence_.Select(policy, q_).result.selections[0];
    for (size_t i = 0; i < s.indices.size(); ++i) {
      if (s.strata[i] == kStratumHeavy) {
        EXPECT_GE(s.indices[i], 4096 - 64 - 256) << name;
      }
    }
  }
}

TEST_P(Adversarial, ZeroKeysAndQueries) {
  for (const bool zero_keys : {true, false}) {
    Context context = context_;
    std::vector<float> q = q_;
    if (zero_keys) std::fill(context.k.begin(), context.k.end(), 0.0f);
    if (!zero_keys) std::fill(q.begin(), q.end(), 0.0f);
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const auto& [name, policy] : Policies()) {
      const JobItem item = sequence.Attend(policy, q);
      ExpectFinite(item, name);
      EXPECT_NEAR(item.result.lse[0], std::log(4096.0), 1e-3) << name << zero_keys;
    }
  }
}

// The unit of sums over values is a power of two that follows their size, so a factor 2^n on all
// values changes no digit.
TEST_P(Adversarial, ValuesOfAnySizeGiveTheSameDigits) {
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    ExpectTrue(context_, sequence_.Attend(policy, q_), policy, name);
  }
  for (const int exponent : {-100, 100}) {
    const auto size = std::ldexp(1.0f, exponent);
    Context context = context_;
    for (float& v : context.v) v *= size;
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const auto& [name, policy] : Policies()) {
      JobItem plain = sequence_.Attend(policy, q_);
      const JobItem item = sequence.Attend(policy, q_);
      ExpectFinite(item, name);
      for (float& x : plain.result.out) x *= size;
      EXPECT_EQ(item.result.out, plain.result.out) << name << " " << exponent;
      EXPECT_EQ(item.result.lse, plain.result.lse) << name;
      EXPECT_EQ(item.result.touched_row_counts, plain.result.touched_row_counts) << name;
      for (size_t h = 0; h < item.result.certificates.size(); ++h) {
        const Certificate &c = item.result.certificates[h], &p = plain.result.certificates[h];
        EXPECT_EQ(c.relative_error, p.relative_error) << name;
        EXPECT_EQ(c.promise, p.promise) << name;
      }
    }
  }
}

// Some values are 2^100 (or 2^200) times as large as the others, in various places: all promises
// must hold. With 2^200, the sums may leave fp32's range in the unit, which follows the first rows;
// then the attend is refused.
TEST_P(Adversarial, ValuesOfUnlikeSizesBreakNoPromise) {
  const std::pair<const char*, bool (*)(int64_t)> kLarge[] = {
      {"the first", [](int64_t t) { return t < 1024; }},
      {"all but the first", [](int64_t t) { return t >= 1024; }},
      {"every second", [](int64_t t) { return t % 2 == 0; }},
      {"a thousandth", [](int64_t t) { return t % 1000 == 77; }},
      {"all but a thousandth", [](int64_t t) { return t % 1000 != 77; }},
      {"the window", [](int64_t t) { return t >= 4050; }}};
  for (const int exponent : {50, 100}) {
    int served = 0;
    for (const auto& [what, large] : kLarge) {
      Context context = context_;
      for (int64_t t = 0; t < context.n; ++t) {
        for (int i = 0; i < 64; ++i) {
          context.v[t * 64 + i] *= std::ldexp(1.0f, large(t) ? exponent : -exponent);
        }
      }
      BenchSequence sequence(bench_);
      ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
      for (const auto& [name, policy] : Policies()) {
        const JobItem item = sequence.Attend(policy, q_);
        if (exponent == 100 && item.status.code() == absl::StatusCode::kOutOfRange) continue;
        ++served;
        ExpectFinite(item, std::string(name) + ", " + what);
        ExpectTrue(context, item, policy, std::string(name) + ", " + what);
      }
    }
    EXPECT_GT(served, 0);
  }
}

// Without codes, values have no unit. If their squares are beyond fp32, the variance is unknown,
// and every row is read. If their squares are 0, the output cannot be distinguished from 0, and
// nothing is promised.
TEST_P(Adversarial, ValuesWhoseSquaresLeaveTheRange) {
  const IndexedModel model(1, 2, 64, DType::kF32, EveryIndex(16), {.kind = HashKind::kNone});
  DeviceBench bench(GetParam(), model.spec, 0, model.file);
  for (const float size : {1e25f, 1e-30f}) {
    Context context = reference::TraceContext(model.spec, 4096, 61);
    for (float& v : context.v) v *= size;
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const auto& [name, policy] : PoliciesOf(model.spec)) {
      const JobItem item = sequence.Attend(policy, q_);
      ExpectFinite(item, name);
      ExpectTrue(context, item, policy, name);
      const bool exact = size > 1 || policy.selector == Selector::kAll;
      EXPECT_EQ(item.result.certificates[0].promise, exact ? Promise::kExact : Promise::kNone)
          << name << " " << size;
    }
  }
}

// The mean of the values is finite, but their sum is not.
TEST_P(Adversarial, AnOutputThatOverflowsIsRefusedByItsHead) {
  std::fill(context_.v.begin(), context_.v.end(), 3e38f);
  for (float& x : QueryOf(0)) x = 0;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    const JobItem item = sequence_.Attend(policy, q_);
    EXPECT_EQ(item.status.code(), absl::StatusCode::kOutOfRange) << name;
    EXPECT_NE(item.status.message().find("query 0, query head 0 at layer 0"), std::string::npos)
        << name << ": " << item.status;
  }
}

TEST_P(Adversarial, HugeSpreadOfLengths) {
  for (int64_t t = 0; t < context_.n; ++t) {
    const float factor = std::exp2(static_cast<float>(t * 7919 % 160) - 80);
    for (float& x : Key(t)) x *= factor;
  }
  for (float& x : q_) x *= 1e-6f;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) ExpectFinite(sequence_.Attend(policy, q_), name);
}

TEST_P(Adversarial, ALogitThatOverflowsIsRefusedByItsToken) {
  // In the sink, so that every policy reads this row.
  for (int i = 0; i < 64; ++i) Key(33)[i] = 1e38f;
  for (float& x : q_) x = 1e3f;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    const JobItem item = sequence_.Attend(policy, q_);
    EXPECT_EQ(item.status.code(), absl::StatusCode::kOutOfRange) << name;
    EXPECT_NE(item.status.message().find("token 33 "), std::string::npos)
        << name << ": " << item.status;
  }
}

// A token beyond a query's visible length does not affect the query.
TEST_P(Adversarial, AnOverflowBeyondTheVisibleLengthIsNotSeen) {
  for (int i = 0; i < 64; ++i) Key(4095)[i] = 1e38f;
  for (float& x : q_) x = 1e3f;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    for (const int64_t visible : {4095, 4000}) {
      Policy no_window = policy;
      no_window.window_token_count = 1;
      EXPECT_TRUE(sequence_.Attend(no_window, q_, {visible}).status.ok())
          << name << " visible " << visible;
    }
    EXPECT_EQ(sequence_.Attend(policy, q_).status.code(), absl::StatusCode::kOutOfRange) << name;
  }
}

TEST_P(Adversarial, OneItemsFailureLeavesTheOthersAlone) {
  for (int i = 0; i < 64; ++i) Key(33)[i] = 1e38f;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  const Context good = reference::TraceContext(spec_, 3000, 63);
  BenchSequence other(bench_);
  ASSERT_TRUE(other.Append(good, 0, good.n).ok());
  std::vector<float> large(q_.size(), 1e3f);
  const Policy policy = DefaultPolicy(spec_);
  auto job = std::make_unique<Job>();
  job->items.push_back(sequence_.AttendItem(policy, large, false));
  job->items.push_back(other.AttendItem(policy, q_, false));
  job = bench_.Run(std::move(job));
  EXPECT_FALSE(job->items[0].status.ok());
  ASSERT_TRUE(job->items[1].status.ok());
  EXPECT_EQ(job->items[1].result.out, other.Attend(policy, q_).result.out);
}

TEST_P(Adversarial, CancelledAndExpired) {
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  for (const auto& [name, policy] : Policies()) {
    for (const bool cancelled : {true, false}) {
      auto job = std::make_unique<Job>();
      job->cancel = cancelled ? std::make_shared<CancelToken>()
                              : std::make_shared<CancelToken>(CancelToken::Clock::now() -
                                                              std::chrono::milliseconds(1));
      if (cancelled) job->cancel->Cancel();
      job->items.push_back(sequence_.AttendItem(policy, q_, false));
      job = bench_.Run(std::move(job));
      EXPECT_EQ(job->items[0].status.code(),
                cancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded)
          << name;
    }
    // The failed attend leaves nothing behind.
    EXPECT_TRUE(sequence_.Attend(policy, q_).status.ok()) << name;
  }
}

// Rows that LSH sampling does not take are not read. The result from the others is finite.
TEST_P(Adversarial, LshSamplingStaysFinite) {
  Policy policy = DefaultPolicy(spec_);
  policy.tail = Tail::kLshSampling;
  if (!IsBuilt(policy)) GTEST_SKIP() << "not in this build";
  for (int64_t t = 0; t < context_.n; ++t) {
    const float factor = std::exp2(static_cast<float>(t * 7919 % 160) - 80);
    for (float& x : Key(t)) x *= factor;
  }
  for (float& x : q_) x *= 1e-6f;
  ASSERT_TRUE(sequence_.Append(context_, 0, context_.n).ok());
  policy.heavy_kind = HeavyKind::kCount;
  for (policy.heavy_count = 0; policy.heavy_count <= 256; policy.heavy_count += 256) {
    const JobItem item = sequence_.Attend(policy, q_);
    ExpectFinite(item, "spread");
    for (const Certificate& c : item.result.certificates) {
      EXPECT_GE(c.tail_mass, 0);
      EXPECT_LE(c.tail_mass, 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Adversarial, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
