// Compares rows that the GPU fetches from pinned pages with rows that the host copies.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gpu/device/row_fetcher.h"
#include "tests/gpu/device_array.h"
#include "tests/gpu/pin_extents.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr std::byte kPoison{0xA5};

// A layer of random rows in pinned pages.
class FetchTest : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  void Open(int64_t tokens) {
    spec.kv_head_count = GetParam().first;
    spec.head_dim = GetParam().second;
    spec.dtype = DType::kF16;
    arena = Arena::Create({.limit_bytes = 512 * kMiB}, &host_budget, PinExtents()).value();
    pool = std::make_unique<PagePool>(arena.get(), kPageTokenCount * spec.row_bytes());
    rows = std::make_unique<LayerRows>(pool.get(), spec);
    // As in the engine: large extents, in which pages lie side by side.
    arena->Expect(spec.kv_head_count * tokens * spec.row_bytes());
    ASSERT_TRUE(rows->PrepareAppend(tokens).ok());
    std::vector<std::byte> source(spec.kv_head_count * tokens * spec.row_bytes() / 2);
    for (std::byte& b : source) b = static_cast<std::byte>(random());
    const int64_t half = spec.row_bytes() / 2;
    for (int h = 0; h < spec.kv_head_count; ++h) {
      // The values are the keys in reverse order.
      rows->WriteRows(h, 0, 0, tokens, RowSource::Dense(source.data(), tokens, half),
                      {source.data() + (tokens - 1) * half, tokens * half, -half});
    }
    rows->Commit(tokens);
  }

  // Fetches to host and to GPU memory, and compares all bytes, also between rows. Strides are in
  // half rows (K or V).
  void ExpectSame(FetchWork work, int64_t head_stride, int64_t token_stride, int64_t bytes) {
    const int64_t half = spec.row_bytes() / 2;
    std::vector<std::byte> k(bytes, kPoison), v(bytes, kPoison);
    const DeviceArray<std::byte> k_there(k), v_there(v);
    work.k = {k.data(), head_stride * half, token_stride * half};
    work.v = {v.data(), head_stride * half, token_stride * half};
    ASSERT_TRUE(FetchRows(work).ok());
    work.k.data = k_there.data();
    work.v.data = v_there.data();
    work.on_gpu = true;
    const absl::Status status = Fetch(work);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(k_there.Fetch() == k);
    EXPECT_TRUE(v_there.Fetch() == v);
  }
  absl::Status Fetch(const FetchWork& work) {
    std::promise<absl::Status> ended;
    fetcher.Fetch(work, [&](absl::Status status) { ended.set_value(std::move(status)); });
    return ended.get_future().get();
  }

  ModelSpec spec;
  std::minstd_rand random{11};
  MemoryBudget host_budget{1024 * kMiB}, device_budget{64 * kMiB};
  std::unique_ptr<Arena> arena;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<LayerRows> rows;
  RowFetcher fetcher{{.ordinal = 0, .name = "cuda:0"}, &device_budget, &host_budget};
};

TEST_P(FetchTest, Tokens) {
  constexpr int64_t kTokens = 50'000;  // several launches if there are many heads
  Open(kTokens);
  const int heads = spec.kv_head_count;
  const int64_t half = spec.row_bytes() / 2;
  for (const auto& [start, count] :
       {std::pair<int64_t, int64_t>{0, kTokens}, {1, 1}, {127, 2}, {256, 128}, {12'345, 34'567}}) {
    FetchWork work{.rows = rows->Share(kTokens), .start = start, .count = count};
    ExpectSame(std::move(work), count, 1, heads * count * half);
  }
  // [count, H_kv + 1, d]
  FetchWork work{.rows = rows->Share(kTokens), .start = 77, .count = 1000};
  ExpectSame(std::move(work), 1, heads + 1, 1000 * (heads + 1) * half);
}

// The rows of a head are in long pieces, some of which the copy engine copies, and in scattered
// pages.
TEST_P(FetchTest, TokensOfScatteredPages) {
  constexpr int64_t kTokens = 40'000;
  Open(kTokens);
  const int heads = spec.kv_head_count;
  const int64_t half = spec.row_bytes() / 2;
  // A fork that grows: page by page, each beside those of the other heads, then by the rest at
  // once.
  LayerRows fork = rows->Share(kTokens / 2);
  while (fork.token_count() < kTokens) {
    const int64_t begin = fork.token_count();
    const int64_t count =
        begin < kTokens / 2 + 20 * kPageTokenCount ? kPageTokenCount : kTokens - begin;
    ASSERT_TRUE(fork.PrepareAppend(count).ok());
    std::vector<std::byte> source(heads * count * half);
    for (std::byte& b : source) b = static_cast<std::byte>(random());
    const RowSource dense = RowSource::Dense(source.data(), count, half);
    for (int h = 0; h < heads; ++h) fork.WriteRows(h, begin, 0, count, dense, dense);
    fork.Commit(begin + count);
  }
  FetchWork work{.rows = fork.Share(kTokens), .start = 100, .count = kTokens - 100};
  ExpectSame(std::move(work), kTokens, 1, heads * kTokens * half);
}

TEST_P(FetchTest, ChosenRows) {
  constexpr int64_t kTokens = 50'000;
  Open(kTokens);
  const int heads = spec.kv_head_count;
  const int64_t half = spec.row_bytes() / 2;
  for (const uint32_t modulus : {1u, 3u, 1000u, 49'999u}) {
    FetchWork work{.rows = rows->Share(kTokens)};
    work.chosen.emplace(heads);
    // No row of the first head is chosen.
    for (int h = 1; h < heads; ++h) {
      for (uint32_t t = 0; t < kTokens; ++t) {
        if (random() % modulus == 0) (*work.chosen)[h].push_back(t);
      }
    }
    const int64_t count = work.row_count();
    ExpectSame(std::move(work), 0, 2, (2 * count + 1) * half);
  }
}

TEST_P(FetchTest, WhatIsCancelledStops) {
  Open(1000);
  const DeviceArray<std::byte> there(
      std::vector<std::byte>(spec.kv_head_count * 1000 * spec.row_bytes() / 2, kPoison));
  const int64_t half = spec.row_bytes() / 2;
  FetchWork work{.rows = rows->Share(1000), .count = 1000};
  work.k = work.v = {there.data(), 1000 * half, half};
  work.on_gpu = true;
  work.cancel = std::make_shared<CancelToken>();
  work.cancel->Cancel();
  EXPECT_TRUE(absl::IsCancelled(Fetch(work)));
  for (const std::byte b : there.Fetch()) ASSERT_EQ(b, kPoison);
}

INSTANTIATE_TEST_SUITE_P(Shapes, FetchTest,
                         ::testing::Values(std::pair(1, 16), std::pair(2, 48), std::pair(8, 128),
                                           std::pair(5, 256)));

}  // namespace
}  // namespace spillway::cuda
