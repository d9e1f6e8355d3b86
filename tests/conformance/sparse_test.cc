// A sparse attend is weighted attention over the rows that Select returns, and its certificates
// follow from these rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/conformance/expect_weighted.h"

namespace spillway {
namespace {

using reference::Context;

struct Case {
  std::string name;
  Policy policy;
  bool promises;  // whether estimates within epsilon carry a promise
};

// For a model with 3 bits per dimension. Ranks from these codes or from the oracle carry a promise;
// ranks by matching bits do not. vAttention's lemmas do not rest on ranks, but the bound of the
// denominator says nothing about the output.
std::vector<Case> Cases(const ModelSpec& spec) {
  std::vector<Case> cases;
  for (const auto& [selector, name, ranks_bear] :
       {std::tuple(Selector::kAsymmetric, "asymmetric", true),
        std::tuple(Selector::kHamming, "hamming", false),
        std::tuple(Selector::kOracle, "oracle", true)}) {
    Policy policy = DefaultPolicy(spec);
    policy.selector = selector;
    policy.seed = 17;
    cases.push_back({std::string(name) + " stratified", policy, ranks_bear});
    Policy none = policy;
    none.tail = Tail::kNone;
    cases.push_back({std::string(name) + " none", none, false});
    for (const auto& [bound, bound_name, promises] :
         {std::tuple(Bound::kDenominator, "denominator", false),
          std::tuple(Bound::kPaper, "paper", true),
          std::tuple(Bound::kRatio, "ratio", ranks_bear)}) {
      Policy uniform = policy;
      uniform.tail = Tail::kUniform;
      uniform.bound = bound;
      cases.push_back({std::string(name) + " " + bound_name, uniform, promises});
    }
    Policy fraction = policy;
    fraction.heavy_kind = HeavyKind::kFraction;
    fraction.heavy_fraction = 0.02;
    cases.push_back({std::string(name) + " fraction", fraction, ranks_bear});
    if (selector == Selector::kHamming) continue;
    Policy mass = policy;
    mass.heavy_kind = HeavyKind::kMass;
    mass.heavy_mass = 0.5;
    cases.push_back({std::string(name) + " top-p", mass, ranks_bear});
  }
  std::erase_if(cases, [](const Case& c) { return !IsBuilt(c.policy); });
  return cases;
}

class Sparse : public ::testing::TestWithParam<DeviceFactory> {};

TEST_P(Sparse, IsWeightedAttentionOverItsSelection) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const ModelSpec spec = MakeSpec(2, 3, 64, dtype);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::TraceContext(spec, 4200, 11);
    const std::vector<float> q = reference::TraceQueries(context, 2, 12, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const auto& [name, policy, promises] : Cases(spec)) {
      ASSERT_TRUE(Validate(policy, spec).empty()) << name;
      ExpectWeighted(context, q, policy, promises, sequence.Attend(policy, q),
                     sequence.Select(policy, q), std::string(DTypeName(dtype)) + " " + name);
    }
  }
}

TEST_P(Sparse, EveryHeadDimAndManyGroups) {
  for (const auto& [d, group] : {std::pair(16, 2), std::pair(48, 3), std::pair(80, 1),
                                 std::pair(96, 5), std::pair(128, 8), std::pair(256, 16)}) {
    const ModelSpec spec = MakeSpec(1, group, d, DType::kBF16);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::TraceContext(spec, 2500, d);
    const std::vector<float> q = reference::TraceQueries(context, 1, d, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const auto& [selector, promises] :
         {std::pair(Selector::kAsymmetric, true), std::pair(Selector::kHamming, false),
          std::pair(Selector::kOracle, true)}) {
      Policy policy = DefaultPolicy(spec);
      policy.selector = selector;
      if (!IsBuilt(policy)) continue;
      ExpectWeighted(context, q, policy, promises, sequence.Attend(policy, q),
                     sequence.Select(policy, q),
                     "d " + std::to_string(d) + " G " + std::to_string(group));
    }
  }
}

TEST_P(Sparse, ExplicitVisibleLengthsHideWhatFollows) {
  const ModelSpec spec = MakeSpec(1, 2, 64, DType::kF32);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 5000, 21);
  const std::vector<float> q = reference::TraceQueries(context, 3, 22, 1.5);
  BenchSequence whole(bench);
  ASSERT_TRUE(whole.Append(context, 0, context.n).ok());
  // One dense query among sparse queries.
  const std::vector<int64_t> visible = {3001, 1500, 4990};
  for (const auto& [name, policy, promises] : Cases(spec)) {
    const JobItem attend = whole.Attend(policy, q, visible);
    const JobItem select = whole.Select(policy, q, visible);
    ASSERT_TRUE(attend.status.ok()) << name;
    // Each query's result is that of a sequence that ends where its visible tokens end.
    for (int t = 0; t < 3; ++t) {
      BenchSequence prefix(bench);
      ASSERT_TRUE(prefix.Append(context, 0, visible[t]).ok());
      const int64_t width = spec.query_head_count * spec.head_dim;
      const std::vector<float> one(q.begin() + t * width, q.begin() + (t + 1) * width);
      const JobItem alone = prefix.Attend(policy, one);
      const JobItem alone_select = prefix.Select(policy, one);
      EXPECT_TRUE(std::equal(alone.result.out.begin(), alone.result.out.end(),
                             attend.result.out.begin() + t * width))
          << name << " query " << t;
      EXPECT_EQ(alone_select.result.selections[0].indices, select.result.selections[t].indices)
          << name << " query " << t;
    }
  }
}

TEST_P(Sparse, SameBitsTwiceAndWithAnyNumberOfThreads) {
  const ModelSpec spec = MakeSpec(2, 4, 64, DType::kBF16);
  const Context context = reference::TraceContext(spec, 40000, 31);
  const std::vector<float> q = reference::TraceQueries(context, 1, 32, 1.5);
  std::map<std::string, JobItem> first;
  for (const int threads : {1, 2, 4}) {
    DeviceBench bench(GetParam(), spec, threads);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    std::vector<Case> cases = Cases(spec);
    Policy all;
    all.selector = Selector::kAll;
    cases.push_back({"all", all, false});
    for (const auto& [name, policy, promises] : cases) {
      for (int repeat = 0; repeat < 2; ++repeat) {
        JobItem item = sequence.Attend(policy, q);
        ASSERT_TRUE(item.status.ok()) << name;
        if (first.count(name) == 0) {
          first.emplace(name, std::move(item));
          continue;
        }
        const AttendResult& a = first.at(name).result;
        const AttendResult& b = item.result;
        EXPECT_EQ(a.out, b.out) << name << " threads " << threads;
        EXPECT_EQ(a.lse, b.lse) << name << " threads " << threads;
        EXPECT_EQ(a.touched_row_counts, b.touched_row_counts) << name << " threads " << threads;
        for (size_t i = 0; i < a.certificates.size(); ++i) {
          // Compares the bits: tail_mass may be NaN.
          EXPECT_EQ(std::bit_cast<uint32_t>(a.certificates[i].relative_error),
                    std::bit_cast<uint32_t>(b.certificates[i].relative_error))
              << name;
        }
      }
    }
  }
}

// As the audit requests it: each KV head's result is as if all heads had its policy.
TEST_P(Sparse, KvHeadsMayHaveTailsOfTheirOwn) {
  const ModelSpec spec = MakeSpec(3, 2, 64, DType::kBF16);
  const Context context = reference::TraceContext(spec, 5000, 31);
  const std::vector<float> q = reference::TraceQueries(context, 2, 33, 1.5);
  DeviceBench bench(GetParam(), spec);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, 5000).ok());
  std::vector<Policy> policies(3, DefaultPolicy(spec));
  policies[0].inflation = 2.5;
  policies[1].pilot_token_count = 200;
  policies[2].tail = Tail::kUniform;
  policies[2].bound = Bound::kPaper;
  const auto run = [&](const Policy& policy, std::vector<TailPolicy> tails) {
    JobItem item = sequence.AttendItem(policy, q, /*select_only=*/false);
    item.attend->tails = std::move(tails);
    return sequence.RunOne(std::move(item));
  };
  const JobItem mixed = run(DefaultPolicy(spec), {policies.begin(), policies.end()});
  ASSERT_TRUE(mixed.status.ok()) << mixed.status;
  const JobItem plain = run(DefaultPolicy(spec), {});
  for (int h = 0; h < 3; ++h) {
    const JobItem alone = run(policies[h], {});
    ASSERT_TRUE(alone.status.ok()) << alone.status;
    bool differs = false;
    for (int64_t t = 0; t < 2; ++t) {
      const int64_t row = t * 3 + h;
      EXPECT_EQ(mixed.result.touched_row_counts[row], alone.result.touched_row_counts[row]);
      differs |= mixed.result.touched_row_counts[row] != plain.result.touched_row_counts[row];
      for (int g = 0; g < 2; ++g) {
        const int head = 2 * h + g;
        const std::span<const float> a = OutputOf(spec, mixed.result, t, head);
        const std::span<const float> b = OutputOf(spec, alone.result, t, head);
        EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << "head " << head;
        EXPECT_EQ(mixed.result.certificates[t * 6 + head].relative_error,
                  alone.result.certificates[t * 6 + head].relative_error);
      }
    }
    EXPECT_TRUE(differs) << "KV head " << h << " was served as ever";
  }
}

TEST_P(Sparse, SequencesInOneJobDoNotTouchEachOther) {
  const ModelSpec spec = MakeSpec(2, 2, 64, DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  const Policy policy = DefaultPolicy(spec);
  std::vector<Context> contexts;
  std::vector<std::vector<float>> queries;
  std::vector<std::unique_ptr<BenchSequence>> sequences;
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(reference::TraceContext(spec, 1000 + 1500 * i, i));
    queries.push_back(reference::TraceQueries(contexts[i], 1 + i % 2, i, 1.5));
    sequences.push_back(std::make_unique<BenchSequence>(bench));
    ASSERT_TRUE(sequences[i]->Append(contexts[i], 0, contexts[i].n).ok());
  }
  auto job = std::make_unique<Job>();
  for (int i = 0; i < 4; ++i) {
    job->items.push_back(sequences[i]->AttendItem(policy, queries[i], false));
  }
  job = bench.Run(std::move(job));
  for (int i = 0; i < 4; ++i) {
    const JobItem alone = sequences[i]->Attend(policy, queries[i]);
    ASSERT_TRUE(alone.status.ok() && job->items[i].status.ok());
    EXPECT_EQ(alone.result.out, job->items[i].result.out) << i;
    EXPECT_EQ(alone.result.lse, job->items[i].result.lse) << i;
  }
}

TEST_P(Sparse, RowCountMaxIsNeverExceededAndTakesThePromise) {
  const ModelSpec spec = MakeSpec(2, 2, 64, DType::kF32);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 8192, 41);
  const std::vector<float> q = reference::TraceQueries(context, 1, 42, 1.5);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
  for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
    Policy policy = DefaultPolicy(spec);
    policy.tail = tail;
    policy.epsilon = 0.01;
    const JobItem free = sequence.Attend(policy, q);
    ASSERT_TRUE(free.status.ok());
    const int64_t wanted = *std::min_element(free.result.touched_row_counts.begin(),
                                             free.result.touched_row_counts.end());
    // The size of a draw varies with the seed. Well below `wanted`, the limit always binds.
    for (int64_t limit = 400; limit < wanted * 4 / 5; limit += 1 + limit / 7) {
      policy.row_count_max = limit;
      for (policy.seed = 0; policy.seed < 5; ++policy.seed) {
        ASSERT_TRUE(Validate(policy, spec).empty()) << limit;
        const JobItem item = sequence.Attend(policy, q);
        ASSERT_TRUE(item.status.ok());
        for (int64_t touched : item.result.touched_row_counts) ASSERT_LE(touched, limit);
        for (const Certificate& c : item.result.certificates) {
          ASSERT_EQ(c.promise, Promise::kNone) << "limit " << limit;
        }
      }
      ExpectWeighted(context, q, policy, /*promises=*/false, sequence.Attend(policy, q),
                     sequence.Select(policy, q), "limit " + std::to_string(limit));
    }
    policy.seed = 0;
    policy.row_count_max = 8192;
    EXPECT_EQ(sequence.Attend(policy, q).result.out, free.result.out);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Sparse, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
