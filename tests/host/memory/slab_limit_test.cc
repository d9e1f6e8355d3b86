#include "host/memory/slab_limit.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "host/memory/page_pool.h"

namespace spillway {
namespace {

constexpr int64_t kSlabs = 10;

// An arena of 10 slabs, of which limited pools may take 6 while 2 stay free.
class SlabLimitTest : public ::testing::Test {
 protected:
  static std::unique_ptr<Arena> MakeArena(MemoryBudget* budget) {
    return *Arena::Create({.limit_bytes = kSlabs * kSlabBytes, .extent_bytes = kSlabBytes}, budget);
  }

  MemoryBudget budget_{kSlabs * kSlabBytes};
  std::unique_ptr<Arena> arena_ = MakeArena(&budget_);
  SlabLimit limit_{arena_.get(), 6 * kSlabBytes, 2 * kSlabBytes};
};

TEST_F(SlabLimitTest, TakesNoMoreThanTheLimit) {
  EXPECT_EQ(limit_.limit_bytes(), 6 * kSlabBytes);
  EXPECT_EQ(limit_.free_bytes(), 6 * kSlabBytes);
  EXPECT_TRUE(limit_.Take(4));
  EXPECT_EQ(limit_.used_bytes(), 4 * kSlabBytes);
  EXPECT_EQ(limit_.free_bytes(), 2 * kSlabBytes);
  EXPECT_FALSE(limit_.Take(3));
  EXPECT_EQ(limit_.used_bytes(), 4 * kSlabBytes);
  EXPECT_TRUE(limit_.Take(2));
  EXPECT_FALSE(limit_.Take(1));
  limit_.Give(6);
  EXPECT_EQ(limit_.used_bytes(), 0);
}

TEST_F(SlabLimitTest, LeavesSpareSlabsToTheOthers) {
  const auto others = arena_->AllocateSlabs(7);
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_EQ(limit_.free_bytes(), kSlabBytes);
  EXPECT_FALSE(limit_.Take(2));
  EXPECT_TRUE(limit_.Take(1));
  limit_.Give(1);
  const auto more = arena_->AllocateSlabs(2);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(limit_.free_bytes(), -kSlabBytes);
  EXPECT_FALSE(limit_.Take(1));
  arena_->FreeSlabs(*others, 7);
  arena_->FreeSlabs(*more, 2);
}

TEST_F(SlabLimitTest, PoolsShareIt) {
  // 32 pages of 64 KiB in a slab.
  PagePool first(arena_.get(), 65536, &limit_), second(arena_.get(), 65536, &limit_);
  PagePool other(arena_.get(), 65536);
  EXPECT_EQ(first.free_page_count(), 6 * 32);
  EXPECT_EQ(other.free_page_count(), 10 * 32);
  std::vector<PageRef> pages;
  for (int i = 0; i < 4 * 32; ++i) pages.push_back(*first.Allocate());
  for (int i = 0; i < 33; ++i) pages.push_back(*second.Allocate());
  EXPECT_EQ(limit_.used_bytes(), 6 * kSlabBytes);
  EXPECT_EQ(first.used_page_count(), 4 * 32);
  EXPECT_EQ(second.used_page_count(), 33);
  EXPECT_EQ(second.spare_page_count(), 31);
  EXPECT_EQ(second.free_page_count(), 31);
  EXPECT_EQ(first.free_page_count(), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(first.Allocate().status()));
  EXPECT_EQ(first.used_page_count(), 4 * 32);
  EXPECT_EQ(limit_.used_bytes(), 6 * kSlabBytes);
  // The other pool takes what is left.
  EXPECT_EQ(other.free_page_count(), 4 * 32);
  // Whole slabs go back, and the other pool may have them.
  for (int i = 0; i < 2 * 32; ++i) first.Release(pages[i]);
  EXPECT_EQ(limit_.used_bytes(), 4 * kSlabBytes);
  EXPECT_EQ(other.free_page_count(), 6 * 32);
  EXPECT_EQ(second.free_page_count(), 31 + 2 * 32);
  for (size_t i = 2 * 32; i < 4 * 32; ++i) first.Release(pages[i]);
  for (size_t i = 4 * 32; i < pages.size(); ++i) second.Release(pages[i]);
  EXPECT_EQ(limit_.used_bytes(), 0);
}

TEST_F(SlabLimitTest, PoolsThatShareStatesPassSlabsOn) {
  const auto states = std::make_shared<PageStates>(arena_.get(), 65536);
  PagePool first(arena_.get(), 65536, &limit_, states),
      second(arena_.get(), 65536, &limit_, states);
  std::vector<PageRef> pages;
  for (int i = 0; i < 6 * 32; ++i) pages.push_back(*first.Allocate());
  EXPECT_FALSE(second.Allocate().ok());
  const PageRef stale = pages.back();
  for (const PageRef page : pages) first.Release(page);
  // The same slabs, but other generations.
  std::vector<PageRef> others;
  for (int i = 0; i < 6 * 32; ++i) others.push_back(*second.Allocate());
  EXPECT_EQ(first.used_page_count(), 0);
  EXPECT_EQ(second.used_page_count(), 6 * 32);
  EXPECT_EQ(second.Data(stale), nullptr);
  int same = 0;
  for (const PageRef page : others) {
    EXPECT_NE(second.Data(page), nullptr);
    same += page.index == stale.index ? 1 : 0;
    EXPECT_FALSE(page == stale);
  }
  EXPECT_EQ(same, 1);
  for (const PageRef page : others) second.Release(page);
}

TEST_F(SlabLimitTest, AFullArenaTakesNothingFromIt) {
  SlabLimit all(arena_.get(), kSlabs * kSlabBytes, 0);
  PagePool limited(arena_.get(), 65536, &all);
  const auto others = arena_->AllocateSlabs(kSlabs);
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_TRUE(absl::IsResourceExhausted(limited.Allocate().status()));
  EXPECT_EQ(all.used_bytes(), 0);
  arena_->FreeSlabs(*others, kSlabs);
  {
    PagePool passing(arena_.get(), 65536, &all);
    ASSERT_TRUE(passing.Allocate().ok());
    EXPECT_EQ(all.used_bytes(), kSlabBytes);
  }
  EXPECT_EQ(all.used_bytes(), 0);
}

}  // namespace
}  // namespace spillway
