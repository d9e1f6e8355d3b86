#include "host/memory/page_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace spillway {
namespace {

class PagePoolTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSlabs = 32;

  static std::unique_ptr<Arena> MakeArena(MemoryBudget* budget) {
    return *Arena::Create({.limit_bytes = kSlabs * kSlabBytes, .extent_bytes = 4 * kSlabBytes},
                          budget);
  }
  MemoryBudget budget_{kSlabs * kSlabBytes};
  std::unique_ptr<Arena> arena_ = MakeArena(&budget_);
};

TEST_F(PagePoolTest, WastesLittleOfASlab) {
  for (const int64_t bytes : {int64_t{1} << 10, int64_t{4352}, int64_t{17408}, int64_t{49152},
                              int64_t{65536}, int64_t{81920}, int64_t{98304}, int64_t{196608},
                              int64_t{1} << 18, int64_t{1000}, int64_t{200000}}) {
    const PagePool pool(arena_.get(), bytes);
    EXPECT_EQ(pool.page_bytes() % 64, 0);
    EXPECT_GE(pool.page_bytes(), bytes);
    EXPECT_LT(pool.page_bytes(), bytes + 64);
    const int64_t slab = pool.slab_count() * kSlabBytes;
    const int64_t used = pool.pages_per_slab() * pool.page_bytes();
    EXPECT_LE(used, slab);
    EXPECT_LE(static_cast<double>(slab - used), 0.016 * static_cast<double>(slab)) << bytes;
  }
  EXPECT_EQ(PagePool(arena_.get(), 65536).slab_count(), 1);
  EXPECT_EQ(PagePool(arena_.get(), 4352).slab_count(), 1);
}

TEST_F(PagePoolTest, PagesDoNotOverlap) {
  for (const int64_t bytes : {int64_t{4352}, int64_t{200000}}) {
    PagePool pool(arena_.get(), bytes);
    std::vector<PageRef> pages;
    while (pool.free_page_count() > 0) {
      const auto page = pool.Allocate();
      ASSERT_TRUE(page.ok()) << page.status();
      pages.push_back(*page);
    }
    EXPECT_FALSE(pool.Allocate().ok());
    std::set<std::byte*> places;
    for (const PageRef page : pages) {
      std::byte* data = pool.Data(page);
      ASSERT_NE(data, nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
      places.insert(data);
    }
    ASSERT_EQ(places.size(), pages.size());
    for (auto it = places.begin(); std::next(it) != places.end(); ++it) {
      ASSERT_LE(*it + pool.page_bytes(), *std::next(it));
    }
    for (const PageRef page : pages) pool.Release(page);
    EXPECT_EQ(arena_->statistics().used_bytes, 0);
  }
}

TEST_F(PagePoolTest, NeighboursStandTogether) {
  PagePool pool(arena_.get(), 65536);
  const PageRef a = *pool.Allocate();
  const PageRef b = *pool.Allocate(a);
  EXPECT_EQ(pool.Data(b), pool.Data(a) + 65536);
  const PageRef other = *pool.Allocate();
  EXPECT_EQ(pool.Data(other), pool.Data(b) + 65536);
  // The next place is taken, so the first free one after it is used.
  const PageRef c = *pool.Allocate(b);
  EXPECT_EQ(pool.Data(c), pool.Data(other) + 65536);
  // A free place before the neighbour is used only if there is none after it.
  pool.Release(a);
  const PageRef d = *pool.Allocate(c);
  EXPECT_EQ(pool.Data(d), pool.Data(c) + 65536);
  for (const PageRef p : {b, other, c, d}) pool.Release(p);
}

TEST_F(PagePoolTest, AStaleReferenceGivesNull) {
  PagePool pool(arena_.get(), 4096);
  const PageRef keep = *pool.Allocate();
  const PageRef old = *pool.Allocate(keep);
  pool.Release(old);
  EXPECT_EQ(pool.Data(old), nullptr);
  const PageRef reused = *pool.Allocate(keep);
  EXPECT_EQ(reused.index, old.index);
  EXPECT_NE(reused.generation, old.generation);
  EXPECT_EQ(pool.Data(old), nullptr);
  EXPECT_NE(pool.Data(reused), nullptr);
  pool.Release(reused);
  pool.Release(keep);  // the slab is gone, but the state of its page stays
  EXPECT_EQ(pool.Data(keep), nullptr);
  EXPECT_EQ(pool.Data(PageRef{}), nullptr);
  EXPECT_EQ(pool.Data(PageRef{~0u, 1}), nullptr);
}

TEST_F(PagePoolTest, StaleUseAborts) {
  // Threads are running; a plain fork would copy the locks that they hold.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PagePool pool(arena_.get(), 4096);
  const PageRef page = *pool.Allocate();
  pool.Release(page);
  EXPECT_DEATH(pool.Release(page), "stale");
  EXPECT_DEATH(pool.AddReference(page), "stale");
  EXPECT_DEATH(pool.IsShared(page), "stale");
}

TEST_F(PagePoolTest, CountsReferences) {
  PagePool pool(arena_.get(), 4096);
  const PageRef page = *pool.Allocate();
  EXPECT_FALSE(pool.IsShared(page));
  pool.AddReference(page);
  EXPECT_TRUE(pool.IsShared(page));
  EXPECT_EQ(pool.used_page_count(), 1);
  pool.Release(page);
  EXPECT_FALSE(pool.IsShared(page));
  EXPECT_NE(pool.Data(page), nullptr);
  pool.Release(page);
  EXPECT_EQ(pool.used_page_count(), 0);
}

TEST_F(PagePoolTest, ReturnsEmptySlabsToTheArena) {
  PagePool pool(arena_.get(), 65536);
  std::vector<PageRef> pages;
  for (int i = 0; i < 70; ++i) pages.push_back(*pool.Allocate());
  EXPECT_EQ(arena_->statistics().used_bytes, 3 * kSlabBytes);
  EXPECT_EQ(pool.spare_page_count(), 3 * 32 - 70);
  EXPECT_EQ(pool.free_page_count(), kSlabs * 32 - 70);
  for (int i = 32; i < 64; ++i) pool.Release(pages[i]);
  EXPECT_EQ(arena_->statistics().used_bytes, 2 * kSlabBytes);
  EXPECT_EQ(pool.free_page_count(), kSlabs * 32 - 38);
  for (int i = 0; i < 70; ++i) {
    if (i < 32 || i >= 64) pool.Release(pages[i]);
  }
  EXPECT_EQ(arena_->statistics().used_bytes, 0);
  EXPECT_EQ(pool.spare_page_count(), 0);
}

TEST_F(PagePoolTest, TwoPoolsShareTheArena) {
  PagePool rows(arena_.get(), 65536), codes(arena_.get(), 4352);
  std::vector<PageRef> held;
  for (int64_t i = 0; i < kSlabs * 32; ++i) held.push_back(*rows.Allocate());
  EXPECT_EQ(codes.free_page_count(), 0);
  const absl::Status full = codes.Allocate().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      full.GetPayload(absl::string_view(kNeededFreePayload.data(), kNeededFreePayload.size())));
  for (const PageRef page : held) rows.Release(page);
  const auto page = codes.Allocate();
  ASSERT_TRUE(page.ok());
  // References of `rows` into the slab that `codes` holds now are still stale.
  for (const PageRef old : held) ASSERT_EQ(rows.Data(old), nullptr);
  codes.Release(*page);
}

TEST_F(PagePoolTest, ManyThreads) {
  PagePool pool(arena_.get(), 65536);
  constexpr int kThreads = 4;
  std::atomic<int> errors{0};
  // All threads read this page all the time, and each releases it once.
  const PageRef shared = *pool.Allocate();
  std::memset(pool.Data(shared), 0x5a, 64);
  for (int t = 0; t < kThreads; ++t) pool.AddReference(shared);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      std::vector<std::pair<PageRef, std::byte>> held;
      std::vector<PageRef> freed;
      for (int step = 0; step < 4000; ++step) {
        const auto mark = std::byte(rng());
        if (rng() % 2 == 0 || held.empty()) {
          const auto page = pool.Allocate(held.empty() ? PageRef{} : held.back().first);
          if (!page.ok()) {
            ++errors;
            continue;
          }
          std::memset(pool.Data(*page), static_cast<int>(mark), 256);
          held.emplace_back(*page, mark);
        } else {
          const size_t i = rng() % held.size();
          const std::byte* data = pool.Data(held[i].first);
          if (data == nullptr || data[0] != held[i].second || data[255] != held[i].second) ++errors;
          pool.Release(held[i].first);
          freed.push_back(held[i].first);
          held[i] = held.back();
          held.pop_back();
        }
        if (pool.Data(shared)[63] != std::byte{0x5a}) ++errors;
        if (!freed.empty() && pool.Data(freed[rng() % freed.size()]) != nullptr) ++errors;
      }
      for (const auto& [page, mark] : held) pool.Release(page);
      pool.Release(shared);
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(errors, 0);
  EXPECT_EQ(pool.used_page_count(), 1);
  pool.Release(shared);
  EXPECT_EQ(arena_->statistics().used_bytes, 0);
}

}  // namespace
}  // namespace spillway
