#include "host/policy/dense_choice.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

// As an H100 has them.
constexpr GpuRates kRates{3.35e6, 132};
constexpr int64_t kCodeBytes = 61;

ModelSpec SpecOf(int kv_heads, int query_heads) {
  ModelSpec spec;
  spec.kv_head_count = kv_heads;
  spec.query_head_count = query_heads;
  spec.head_dim = 128;
  spec.dtype = DType::kBF16;
  return spec;
}

std::vector<bool> Choose(const ModelSpec& spec, const std::vector<DenseCandidate>& candidates,
                         const GpuRates& rates = kRates) {
  return ChooseDense(spec, rates, kCodeBytes, 1, candidates);
}

std::vector<DenseCandidate> Alike(size_t count, int64_t tokens) {
  return std::vector<DenseCandidate>(count, {tokens, true});
}

// Measured on an H100, us a layer: 1 x 64K dense 149, sparse 153; 16 x 64K 1,694 and 521; 16 x 16K
// with 2 KV heads about 130 and 219.
TEST(DenseChoice, TakesWhatIsFaster) {
  const ModelSpec eight = SpecOf(8, 32), two = SpecOf(2, 12);
  EXPECT_EQ(Choose(eight, Alike(1, 65536)), std::vector<bool>(1, true));
  EXPECT_EQ(Choose(eight, Alike(1, 262144)), std::vector<bool>(1, false));
  EXPECT_EQ(Choose(eight, Alike(16, 65536)), std::vector<bool>(16, false));
  EXPECT_EQ(Choose(eight, Alike(16, 8192)), std::vector<bool>(16, true));
  EXPECT_EQ(Choose(two, Alike(16, 16384)), std::vector<bool>(16, true));
  EXPECT_EQ(Choose(two, Alike(1, 131072)), std::vector<bool>(1, true));
}

TEST(DenseChoice, NeverOfRowsThatAreElsewhere) {
  const ModelSpec two = SpecOf(2, 12);
  EXPECT_EQ(Choose(two, {{16384, false}}), std::vector<bool>(1, false));
  // The rest is sparse anyway, so dense attention must be less work for each.
  EXPECT_EQ(Choose(two, {{1024, true}, {32768, false}, {131072, true}, {4096, false}}),
            (std::vector<bool>{false, false, false, false}));
  std::vector<DenseCandidate> many = Alike(64, 1024);
  many.push_back({32768, false});
  many.push_back({131072, true});
  std::vector<bool> expected(64, true);
  expected.insert(expected.end(), {false, false});
  EXPECT_EQ(Choose(two, many), expected);
}

TEST(DenseChoice, WhatIsDenseAnywayDecidesNothing) {
  // The short sequence has no copy, and is dense by its policy.
  EXPECT_EQ(Choose(SpecOf(2, 12), {{512, false, true}, {16384, true}}),
            (std::vector<bool>{false, true}));
  EXPECT_EQ(Choose(SpecOf(2, 12), {{512, false, false}, {16384, true}}),
            (std::vector<bool>{false, false}));
  EXPECT_EQ(Choose(SpecOf(2, 12), {{512, true, true}}), std::vector<bool>(1, false));
}

TEST(DenseChoice, ALongerSequenceDoesNotBecomeDenseAgain) {
  const ModelSpec spec = SpecOf(8, 32);
  for (const size_t count : {1, 4, 16}) {
    bool dense = true;
    for (int64_t n = 256; n <= int64_t{1} << 20; n += 256) {
      const bool now = Choose(spec, Alike(count, n)).front();
      EXPECT_TRUE(dense || !now) << count << " sequences of " << n;
      dense = now;
    }
    EXPECT_FALSE(dense);
  }
}

TEST(DenseChoice, SparseIfTheRateIsNotKnown) {
  EXPECT_EQ(Choose(SpecOf(8, 32), Alike(1, 4096), {0, 132}), std::vector<bool>(1, false));
}

TEST(DenseChoice, AStepOfManyQueriesReadsTheRowsSeveralTimes) {
  // A group of 16 query heads: each query is a pass over the rows.
  const ModelSpec spec = SpecOf(1, 16);
  const std::vector<DenseCandidate> one{{1048576, true}};
  EXPECT_EQ(ChooseDense(spec, kRates, kCodeBytes, 1, one), std::vector<bool>(1, false));
  const std::vector<DenseCandidate> shorter{{262144, true}};
  EXPECT_EQ(ChooseDense(spec, kRates, kCodeBytes, 1, shorter), std::vector<bool>(1, true));
  EXPECT_EQ(ChooseDense(spec, kRates, kCodeBytes, 8, shorter), std::vector<bool>(1, false));
}

}  // namespace
}  // namespace spillway
