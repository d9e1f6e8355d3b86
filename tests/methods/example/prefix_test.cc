// On the CPU device, the selector of docs/adding-a-selector.md selects what the page says.
#include "tests/methods/example/prefix.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "host/policy/methods.h"
#include "tests/conformance/device_bench.h"

namespace spillway {
namespace {

constexpr int64_t kTokens = 2100;
constexpr int kD = 32;

class Prefix : public ::testing::Test {
 protected:
  // All keys are zero except those that a test sets. Values are the token numbers.
  Prefix()
      : spec_(MakeSpec(1, 1, kD, DType::kF32, {.kind = HashKind::kNone})),
        context_{spec_, kTokens, std::vector<float>(kTokens * kD), {}},
        query_(kD, 1.0f) {
    for (int64_t t = 0; t < kTokens; ++t) {
      context_.v.insert(context_.v.end(), kD, static_cast<float>(t));
    }
    policy_.selector = kPrefixSelector;
    policy_.dense_token_count = 1024;
    policy_.tail = Tail::kNone;
    policy_.heavy_kind = HeavyKind::kCount;
  }

  void SetKey(int64_t token, int element, float value) { context_.k[token * kD + element] = value; }

  // The heavy set for a query of ones.
  std::vector<uint32_t> Heavy() {
    EXPECT_TRUE(Validate(policy_, spec_).empty());
    DeviceBench bench(DeviceFactories().front(), spec_);
    BenchSequence sequence(bench);
    EXPECT_TRUE(sequence.Append(context_, 0, kTokens).ok());
    const JobItem item = sequence.Select(policy_, query_);
    EXPECT_TRUE(item.status.ok()) << item.status;
    std::vector<uint32_t> heavy;
    for (const Selection& s : item.result.selections) {
      for (size_t i = 0; i < s.indices.size(); ++i) {
        if (s.strata[i] == kStratumHeavy) heavy.push_back(s.indices[i]);
      }
    }
    return heavy;
  }

  const ModelSpec spec_;
  reference::Context context_;
  const std::vector<float> query_;
  Policy policy_;
};

TEST_F(Prefix, TakesTheLargestProductsOfTheFirstElements) {
  SetKey(100, 0, 20);
  SetKey(700, 15, 30);
  SetKey(1300, 7, 40);
  SetKey(900, 16, 1000);  // beyond the prefix
  policy_.heavy_count = 1;
  EXPECT_EQ(Heavy(), (std::vector<uint32_t>{1300}));
  policy_.heavy_count = 2;
  EXPECT_EQ(Heavy(), (std::vector<uint32_t>{700, 1300}));
  policy_.heavy_count = 3;
  EXPECT_EQ(Heavy(), (std::vector<uint32_t>{100, 700, 1300}));
}

// Of equal keys, the most recent ones before the window of 64 tokens are heavy.
TEST_F(Prefix, BreaksTiesByAge) {
  policy_.heavy_count = 2;
  EXPECT_EQ(Heavy(), (std::vector<uint32_t>{2034, 2035}));
}

// The selector estimates logits, so a policy can ask for mass. Here one token has most of it.
TEST_F(Prefix, TakesMass) {
  SetKey(700, 3, 200);
  policy_.heavy_kind = HeavyKind::kMass;
  policy_.heavy_mass = 0.9;
  policy_.heavy_floor = 1;
  EXPECT_EQ(Heavy(), (std::vector<uint32_t>{700}));
}

TEST_F(Prefix, AttendsToWhatItSelects) {
  SetKey(700, 0, 200);
  policy_.heavy_count = 1;
  DeviceBench bench(DeviceFactories().front(), spec_);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context_, 0, kTokens).ok());
  const JobItem item = sequence.Attend(policy_, query_);
  ASSERT_TRUE(item.status.ok()) << item.status;
  EXPECT_EQ(item.result.touched_row_counts, (std::vector<int64_t>{64 + 1 + 64}));
  EXPECT_NEAR(item.result.out[0], 700, 1e-3);  // its logit is 35 above all others
}

// Its ranks carry no promise; with an audit there may be promises (docs/adr/0018).
TEST_F(Prefix, PromisesNothing) {
  EXPECT_EQ(FindMethod(kPrefixSelector)->name, "prefix");
  policy_.tail = Tail::kStratified;
  EXPECT_FALSE(RanksCarryGuarantee(policy_, policy_, spec_, kTokens));
  EXPECT_EQ(DefaultPolicy(spec_).selector, Selector::kAll);
}

}  // namespace
}  // namespace spillway
