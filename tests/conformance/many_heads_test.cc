// More than kGroupMax query heads for each KV head: they are attended in equal groups, all of which
// read the same rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/conformance/expect_dense.h"
#include "tests/conformance/expect_weighted.h"
#include "tests/conformance/method_models.h"

namespace spillway {
namespace {

using reference::Context;

// Query heads for each KV head, and the size of their groups.
constexpr std::pair<int, int> kSizes[] = {{17, 1}, {32, 16}, {48, 16}, {71, 1}, {36, 12}};

class ManyHeads : public ::testing::TestWithParam<DeviceFactory> {};

TEST_P(ManyHeads, DenseAttends) {
  for (const auto& [heads, group] : kSizes) {
    const std::string what = std::to_string(heads) + " heads";
    const ModelSpec spec = MakeSpec(2, heads, 64, DType::kBF16);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::GaussianContext(spec, 2100, heads);
    BenchSequence sequence(bench);
    int64_t from = 0;
    // Tokens, and queries: one of a decode step, or those of a chunk of a prompt.
    for (const auto& [n, count] : {std::pair(1, 1), {129, 1}, {300, 3}, {300, 40}, {2100, 1}}) {
      ASSERT_TRUE(sequence.Append(context, from, n).ok());
      from = n;
      const std::vector<float> q = reference::GaussianQueries(spec, count, n + count);
      ExpectDense(context, sequence.Attend(All(), q), q, what + ", n " + std::to_string(n));
    }
  }
}

TEST_P(ManyHeads, SparseAttends) {
  for (const auto& [heads, group] : kSizes) {
    const ModelSpec spec = MakeSpec(1, heads, 64, DType::kBF16);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::TraceContext(spec, 2500, heads);
    const std::vector<float> q = reference::TraceQueries(context, 1, 12, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
      Policy policy = DefaultPolicy(spec);
      policy.selector = selector;
      const auto expect = [&](const Policy& of, bool promises, const std::string& name) {
        ExpectWeighted(context, q, of, promises, sequence.Attend(of, q), sequence.Select(of, q),
                       std::to_string(heads) + " heads, " + name);
      };
      expect(policy, true, "stratified");
      Policy mass = policy;
      mass.heavy_kind = HeavyKind::kMass;
      mass.heavy_mass = 0.5;
      expect(mass, true, "top-p");
      Policy uniform = policy;
      uniform.tail = Tail::kUniform;
      uniform.bound = Bound::kPaper;
      expect(uniform, true, "uniform");
    }
  }
}

// The queries of a model with only one group of each KV head, number `part`.
std::vector<float> QueriesOf(const ModelSpec& whole, const std::vector<float>& q, int part) {
  std::vector<float> of_part;
  const int64_t width = int64_t{whole.group()} * whole.head_dim;
  const int64_t groups = static_cast<int64_t>(q.size()) / width;  // of all queries
  for (int64_t g = part; g < groups; g += whole.groups_per_kv_head()) {
    of_part.insert(of_part.end(), q.begin() + g * width, q.begin() + (g + 1) * width);
  }
  return of_part;
}

// Each group's result has the bits that it has in a model of this group alone.
class Groups : public ManyHeads {
 protected:
  static constexpr int kHeads = 48;
  static constexpr int kGroup = 16;

  static ModelSpec Part(const ModelSpec& whole, int part) {
    ModelSpec spec = whole;
    spec.query_head_count = whole.kv_head_count * kGroup;
    ModelSpec of_logits = whole;
    of_logits.head_dim = 1;
    spec.sink_logits = QueriesOf(of_logits, whole.sink_logits, part);
    return spec;
  }

  // tails: of each KV head; may be empty.
  void ExpectAlike(const ModelSpec& spec, const Policy& policy, const std::string& what,
                   std::span<const std::byte> weights = {}, std::vector<TailPolicy> tails = {}) {
    ASSERT_EQ(spec.group(), kGroup);
    ASSERT_TRUE(Validate(policy, spec).empty()) << what;
    const Context context = reference::TraceContext(spec, 5000, 31);
    const std::vector<float> q = reference::TraceQueries(context, 2, 33, 1.5);
    const auto run = [&](const ModelSpec& of, const std::vector<float>& queries, bool select_only) {
      DeviceBench bench(GetParam(), of, 0, weights);
      BenchSequence sequence(bench);
      EXPECT_TRUE(sequence.Append(context, 0, context.n).ok());
      JobItem item = sequence.AttendItem(policy, queries, select_only);
      item.attend->tails = tails;
      item = sequence.RunOne(std::move(item));
      EXPECT_TRUE(item.status.ok()) << what << ": " << item.status;
      return std::move(item.result);
    };
    // LSH sampling has no selections.
    const bool selects = policy.tail != Tail::kLshSampling;
    const AttendResult attended = run(spec, q, false), selected = run(spec, q, selects);
    for (int part = 0; part < spec.groups_per_kv_head(); ++part) {
      const ModelSpec of = Part(spec, part);
      const std::vector<float> queries = QueriesOf(spec, q, part);
      const AttendResult alone = run(of, queries, false),
                         alone_selected = run(of, queries, selects);
      EXPECT_EQ(QueriesOf(spec, attended.out, part), alone.out) << what;
      for (int64_t i = 0; i < 2 * spec.kv_head_count; ++i) {
        const int64_t group = i * spec.groups_per_kv_head() + part;
        EXPECT_EQ(attended.touched_row_counts[group], alone.touched_row_counts[i]) << what;
        for (int g = 0; g < kGroup; ++g) {
          EXPECT_EQ(attended.lse[group * kGroup + g], alone.lse[i * kGroup + g]) << what;
          const Certificate& got = attended.certificates[group * kGroup + g];
          const Certificate& wanted = alone.certificates[i * kGroup + g];
          EXPECT_EQ(got.promise, wanted.promise) << what;
          // Compares the bits: tail_mass may be NaN.
          EXPECT_EQ(std::bit_cast<uint32_t>(got.relative_error),
                    std::bit_cast<uint32_t>(wanted.relative_error))
              << what;
          EXPECT_EQ(std::bit_cast<uint32_t>(got.tail_mass),
                    std::bit_cast<uint32_t>(wanted.tail_mass))
              << what;
          EXPECT_EQ(got.sampled_token_count, wanted.sampled_token_count) << what;
        }
        if (!selects) continue;
        EXPECT_EQ(selected.selections[group].indices, alone_selected.selections[i].indices) << what;
        EXPECT_EQ(selected.selections[group].log_weights, alone_selected.selections[i].log_weights);
        EXPECT_EQ(selected.selections[group].strata, alone_selected.selections[i].strata);
      }
    }
  }
};

TEST_P(Groups, HaveTheBitsOfModelsOfTheirOwn) {
  for (const int value_bits : {0, 2}) {
    ModelSpec spec = MakeSpec(2, kHeads, 64, DType::kBF16,
                              {.kind = HashKind::kRotation, .value_bits = value_bits});
    for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
      Policy policy = DefaultPolicy(spec);
      policy.selector = selector;
      ExpectAlike(spec, policy, "value bits " + std::to_string(value_bits));
    }
    for (int h = 0; h < spec.query_head_count; ++h) {
      spec.sink_logits.push_back(static_cast<float>(h % 11) - 2.0f);
    }
    ExpectAlike(spec, DefaultPolicy(spec), "sinks, value bits " + std::to_string(value_bits));
  }
}

TEST_P(Groups, HaveTheTailOfTheirKvHead) {
  const ModelSpec spec = MakeSpec(2, kHeads, 64, DType::kBF16);
  std::vector<Policy> policies(2, DefaultPolicy(spec));
  policies[0].inflation = 2.5;
  policies[1].tail = Tail::kUniform;
  policies[1].bound = Bound::kPaper;
  ExpectAlike(spec, DefaultPolicy(spec), "tails", {}, {policies.begin(), policies.end()});
}

TEST_P(Groups, HaveRowsOfEightBits) {
  ModelSpec spec = MakeSpec(2, kHeads, 64, DType::kBF16);
  spec.row_type = RowType::kInt8;
  ASSERT_TRUE(Normalize(spec).empty());
  ExpectAlike(spec, DefaultPolicy(spec), "int8 rows");
}

TEST_P(Groups, HaveEveryMethodThatIndexesKeys) {
  const IndexedModel model(2, kHeads, 64, DType::kBF16, EveryIndex());
  const Policy usual = DefaultPolicy(model.spec);
  std::vector<std::pair<std::string, Policy>> policies;
  for (const Selector selector :
       {Selector::kHamming, Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity}) {
    Policy policy = usual;
    policy.selector = selector;
    policies.emplace_back("selector " + std::to_string(static_cast<int>(selector)), policy);
  }
  Policy first = usual;
  first.candidate_selector = Selector::kHamming;
  first.candidate_fraction = 0.2;
  policies.emplace_back("a first selection", first);
  Policy lsh = usual;
  lsh.tail = Tail::kLshSampling;
  lsh.heavy_kind = HeavyKind::kCount;
  policies.emplace_back("LSH sampling", lsh);
  for (const auto& [name, policy] : policies) {
    if (IsBuilt(policy)) ExpectAlike(model.spec, policy, name, model.file);
  }
}

// Sequences of one prefix, and steps, with both ways to attend.
TEST_P(ManyHeads, SeveralSequencesInOneJob) {
  const ModelSpec spec = MakeSpec(1, 32, 64, DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 5000, 5);
  const std::vector<float> q = reference::TraceQueries(context, 1, 6, 1.5);
  BenchSequence first(bench);
  ASSERT_TRUE(first.Append(context, 0, context.n).ok());
  BenchSequence fork = first.Fork(context.n);
  for (const Policy& policy : {DefaultPolicy(spec), All()}) {
    const JobItem alone = first.Attend(policy, q);
    auto job = std::make_unique<Job>();
    for (BenchSequence* sequence : {&first, &fork}) {
      job->items.push_back(sequence->AttendItem(policy, q, false));
    }
    job = bench.Run(std::move(job));
    for (const JobItem& item : job->items) {
      ASSERT_TRUE(item.status.ok()) << item.status;
      EXPECT_EQ(item.result.out, alone.result.out);
      const std::vector<int64_t>& touched = item.result.touched_row_counts;
      ASSERT_EQ(touched.size(), 2u);
      EXPECT_LE(item.result.moved_row_count, touched[0] + touched[1]);
    }
  }
}

TEST_P(ManyHeads, DecodeSteps) {
  for (const auto& [heads, group] : kSizes) {
    ExpectStepsAppendAndAttend(GetParam(), MakeSpec(1, heads, 64, DType::kBF16));
  }
}

// Of outputs with a promise, at most the share delta is further off than epsilon.
TEST_P(ManyHeads, CertificatesHold) {
  constexpr int kAttends = 24;  // with one seed each
  for (const auto& [heads, group] : {std::pair(32, 16), std::pair(17, 1)}) {
    const ModelSpec spec = MakeSpec(1, heads, 64, DType::kF32);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::TraceContext(spec, 6000, 51);
    const std::vector<float> q = reference::TraceQueries(context, 1, 52, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    std::vector<reference::Attention> exact;
    for (int h = 0; h < heads; ++h) {
      exact.push_back(reference::DenseAttention(context.Head(0), reference::Query(spec, q, 0, h),
                                                spec.softmax_scale, context.n));
    }
    Policy policy = DefaultPolicy(spec);
    policy.epsilon = 0.05;
    int64_t promised = 0, broken = 0;
    double largest = 0;
    for (policy.seed = 0; policy.seed < kAttends; ++policy.seed) {
      const JobItem item = sequence.Attend(policy, q);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (int h = 0; h < heads; ++h) {
        if (item.result.certificates[h].promise != Promise::kStatistical) continue;
        const double error =
            reference::RelativeDistance(OutputOf(spec, item.result, 0, h), exact[h].out);
        ++promised;
        broken += error > policy.epsilon;
        largest = std::max(largest, error);
      }
    }
    EXPECT_GT(promised, kAttends * heads / 2) << heads;
    EXPECT_LE(static_cast<double>(broken), policy.delta * static_cast<double>(promised)) << heads;
    // Otherwise every promise would be trivial.
    EXPECT_GT(largest, policy.epsilon / 10) << heads;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ManyHeads, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Devices, Groups, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
