#include "host/device/fetch_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace spillway {
namespace {

constexpr int kHeads = 3;
constexpr int kDim = 16;
constexpr int64_t kTokens = 1000;
constexpr int64_t kHalf = kDim * int64_t{sizeof(float)};
constexpr float kPoison = -1;

// Element e of K (value 0) or V (value 1) of a token. No two elements are equal.
float Element(int kv_head, int64_t token, int value, int64_t e) {
  return static_cast<float>(((kv_head * kTokens + token) * 2 + value) * kDim + e);
}

class FetchRowsTest : public ::testing::Test {
 protected:
  FetchRowsTest() {
    EXPECT_TRUE(rows.PrepareAppend(kTokens).ok());
    std::vector<float> k, v;
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t e = 0; e < kDim; ++e) {
          k.push_back(Element(h, t, 0, e));
          v.push_back(Element(h, t, 1, e));
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      rows.WriteRows(h, 0, 0, kTokens, RowSource::Dense(k.data(), kTokens, kHalf),
                     RowSource::Dense(v.data(), kTokens, kHalf));
    }
    rows.Commit(kTokens);
  }

  static ModelSpec Spec() {
    ModelSpec spec;
    spec.kv_head_count = kHeads;
    spec.head_dim = kDim;
    spec.dtype = DType::kF32;
    return spec;
  }
  FetchWork Work() { return {.rows = rows.Share(kTokens)}; }
  static RowTarget At(std::vector<float>& to, int64_t head_stride, int64_t token_stride) {
    return {reinterpret_cast<std::byte*>(to.data()), head_stride, token_stride};
  }
  // Expects that a row of K (value 0) or V (value 1) begins at element `at`.
  static void ExpectRow(const std::vector<float>& got, int64_t at, int kv_head, int64_t token,
                        int value) {
    for (int64_t e = 0; e < kDim; ++e) {
      ASSERT_EQ(got[at + e], Element(kv_head, token, value, e))
          << "KV head " << kv_head << ", token " << token << ", element " << e;
    }
  }

  MemoryBudget budget{kSlabBytes};
  std::unique_ptr<Arena> arena = *Arena::Create({.limit_bytes = kSlabBytes}, &budget);
  PagePool pool{arena.get(), kPageTokenCount* Spec().row_bytes()};
  LayerRows rows{&pool, Spec()};
};

TEST_F(FetchRowsTest, CopiesTokensWhereStridesSay) {
  for (const auto& [start, count] :
       {std::pair<int64_t, int64_t>{0, kTokens}, {127, 2}, {128, 128}, {999, 1}, {5, 700}}) {
    FetchWork work = Work();
    work.start = start;
    work.count = count;
    EXPECT_EQ(work.row_count(), kHeads * count);
    // Keys in C order, values as [count, H_kv, d + 1].
    std::vector<float> k(kHeads * count * kDim, kPoison), v(count * kHeads * (kDim + 1), kPoison);
    work.k = At(k, count * kHalf, kHalf);
    const int64_t row = kHalf + int64_t{sizeof(float)};
    work.v = At(v, row, kHeads * row);
    ASSERT_TRUE(FetchRows(work).ok());
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < count; ++t) {
        ExpectRow(k, (h * count + t) * kDim, h, start + t, 0);
        ExpectRow(v, (t * kHeads + h) * (kDim + 1), h, start + t, 1);
        EXPECT_EQ(v[(t * kHeads + h) * (kDim + 1) + kDim], kPoison);
      }
    }
  }
}

TEST_F(FetchRowsTest, CopiesChosenRowsOneHeadAfterTheOther) {
  std::vector<uint32_t> every(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) every[t] = static_cast<uint32_t>(t);
  const std::vector<std::vector<std::vector<uint32_t>>> choices = {
      {{3, 127, 128, 999}, {}, {0}}, {{}, {7}, {}}, {{}, {}, {}}, {every, {1}, every}};
  for (const std::vector<std::vector<uint32_t>>& chosen : choices) {
    FetchWork work = Work();
    work.chosen = chosen;
    const int64_t count = work.row_count();
    std::vector<float> k(count * kDim, kPoison), v(2 * count * kDim, kPoison);
    work.k = At(k, 0, kHalf);
    work.v = At(v, 0, 2 * kHalf);
    ASSERT_TRUE(FetchRows(work).ok());
    int64_t row = 0;
    for (int h = 0; h < kHeads; ++h) {
      for (const uint32_t token : chosen[h]) {
        ExpectRow(k, row * kDim, h, token, 0);
        ExpectRow(v, 2 * row * kDim, h, token, 1);
        EXPECT_EQ(v[2 * row * kDim + kDim], kPoison);
        ++row;
      }
    }
    EXPECT_EQ(row, count);
  }
}

TEST_F(FetchRowsTest, WhatIsCancelledCopiesNothing) {
  FetchWork work = Work();
  work.count = kTokens;
  std::vector<float> k(kHeads * kTokens * kDim, kPoison), v(k);
  work.k = At(k, kTokens * kHalf, kHalf);
  work.v = At(v, kTokens * kHalf, kHalf);
  work.cancel = std::make_shared<CancelToken>();
  work.cancel->Cancel();
  EXPECT_TRUE(absl::IsCancelled(FetchRows(work)));
  EXPECT_THAT(k, ::testing::Each(kPoison));
  EXPECT_THAT(v, ::testing::Each(kPoison));
}

TEST_F(FetchRowsTest, GpuMemoryIsRefused) {
  FetchWork work = Work();
  work.count = 1;
  work.on_gpu = true;
  const absl::Status status = FetchRows(work);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_EQ(status.message(), "k and v are in GPU memory, which the device cannot write");
}

}  // namespace
}  // namespace spillway
