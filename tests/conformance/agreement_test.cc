// Scores are integers or fp32 values, computed in one fixed order. So every device selects the same
// rows as the first.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/method_models.h"

namespace spillway {
namespace {

using reference::Context;

class Agreement : public ::testing::TestWithParam<DeviceFactory> {};
// With only one device, there is nothing to compare.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Agreement);

std::vector<DeviceFactory> OtherDevices() {
  return {DeviceFactories().begin() + 1, DeviceFactories().end()};
}

std::vector<std::pair<std::string, Policy>> Policies(const ModelSpec& spec) {
  std::vector<std::pair<std::string, Policy>> policies;
  for (const auto& [selector, name] :
       {std::pair(Selector::kAsymmetric, "asymmetric"), std::pair(Selector::kHamming, "hamming")}) {
    Policy policy = DefaultPolicy(spec);
    policy.selector = selector;
    policy.tail = Tail::kNone;
    policies.push_back({std::string(name) + " adaptive", policy});
    policy.heavy_kind = HeavyKind::kCount;
    for (const int64_t count : {1, 256, 1500}) {
      policy.heavy_count = count;
      policies.push_back({std::string(name) + " count " + std::to_string(count), policy});
    }
    policy.heavy_kind = HeavyKind::kFraction;
    policy.heavy_fraction = 0.03;
    policies.push_back({std::string(name) + " fraction", policy});
    if (selector == Selector::kHamming) continue;
    policy.heavy_kind = HeavyKind::kMass;
    policy.heavy_mass = 0.7;
    policies.push_back({std::string(name) + " mass", policy});
  }
  std::erase_if(policies, [](const auto& named) { return !IsBuilt(named.second); });
  return policies;
}

TEST_P(Agreement, OnTheHeavySet) {
  for (const auto& [d, bits, group] :
       {std::tuple(64, 1, 1), std::tuple(80, 2, 3), std::tuple(128, 2, 4), std::tuple(128, 3, 8),
        std::tuple(96, 4, 5), std::tuple(256, 2, 16)}) {
    const ModelSpec spec = MakeSpec(
        2, group, d, DType::kBF16,
        {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = static_cast<uint64_t>(d)});
    DeviceBench first(DeviceFactories().front(), spec);
    DeviceBench other(GetParam(), spec);
    Context context = reference::TraceContext(spec, 9001, d);
    // Outlier keys and values, some of them next to a page border.
    for (const int64_t t : {130, 2000, 5119, 5120, 8900}) {
      for (int i = 0; i < d; ++i) {
        context.k[t * d + i] *= 64;
        context.v[(t + 40) * d + i] *= 1 << 18;
      }
    }
    const std::vector<float> q = reference::TraceQueries(context, 2, d + 1, 1.5);
    BenchSequence a(first), b(other);
    ASSERT_TRUE(a.Append(context, 0, context.n).ok());
    ASSERT_TRUE(b.Append(context, 0, context.n, 1000).ok());
    for (const auto& [name, policy] : Policies(spec)) {
      const JobItem x = a.Select(policy, q), y = b.Select(policy, q);
      ASSERT_TRUE(x.status.ok()) << x.status;
      ASSERT_TRUE(y.status.ok()) << y.status;
      for (size_t i = 0; i < x.result.selections.size(); ++i) {
        EXPECT_EQ(x.result.selections[i].indices, y.result.selections[i].indices)
            << name << ", d " << d << ", bits " << bits << ", group " << group;
        EXPECT_EQ(x.result.selections[i].strata, y.result.selections[i].strata) << name;
      }
    }
  }
}

// Estimates from int4 keys, from label channels and from bounds, and LSH buckets.
TEST_P(Agreement, OnOtherIndices) {
  for (const auto& [d, group, page] : {std::tuple(64, 1, 16), std::tuple(80, 3, 32),
                                       std::tuple(128, 4, 64), std::tuple(256, 16, 128)}) {
    const IndexedModel model(2, group, d, DType::kBF16, EveryIndex(page));
    const ModelSpec& spec = model.spec;
    DeviceBench first(DeviceFactories().front(), spec, 0, model.file);
    DeviceBench other(GetParam(), spec, 0, model.file);
    const Context context = reference::TraceContext(spec, 5001, d);
    const std::vector<float> q = reference::TraceQueries(context, 2, d + 1, 1.5);
    BenchSequence a(first), b(other);
    ASSERT_TRUE(a.Append(context, 0, context.n).ok());
    ASSERT_TRUE(b.Append(context, 0, context.n, 1000).ok());
    for (const Selector selector :
         {Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity}) {
      for (const bool staged : {false, true}) {
        Policy policy = DefaultPolicy(spec);
        policy.selector = selector;
        if (staged) policy.candidate_selector = Selector::kAsymmetric;
        policy.tail = Tail::kNone;
        if (!IsBuilt(policy)) continue;
        const std::string what = "selector " + std::to_string(static_cast<int>(selector)) + ", d " +
                                 std::to_string(d) + (staged ? ", of candidates" : "");
        for (const HeavyKind kind : {HeavyKind::kCount, HeavyKind::kFraction, HeavyKind::kMass}) {
          policy.heavy_kind = kind;
          policy.heavy_mass = 0.7;
          const JobItem x = a.Select(policy, q), y = b.Select(policy, q);
          ASSERT_TRUE(x.status.ok()) << x.status;
          ASSERT_TRUE(y.status.ok()) << y.status;
          for (size_t i = 0; i < x.result.selections.size(); ++i) {
            EXPECT_EQ(x.result.selections[i].indices, y.result.selections[i].indices) << what;
            EXPECT_EQ(x.result.selections[i].strata, y.result.selections[i].strata) << what;
          }
        }
        policy.heavy_kind = HeavyKind::kCount;
        policy.tail = Tail::kLshSampling;
        const JobItem x = a.Attend(policy, q), y = b.Attend(policy, q);
        ASSERT_TRUE(x.status.ok()) << x.status;
        ASSERT_TRUE(y.status.ok()) << y.status;
        EXPECT_EQ(x.result.touched_row_counts, y.result.touched_row_counts) << what;
        for (size_t i = 0; i < x.result.out.size(); ++i) {
          ASSERT_NEAR(x.result.out[i], y.result.out[i], 1e-4) << what;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Agreement, ::testing::ValuesIn(OtherDevices()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
