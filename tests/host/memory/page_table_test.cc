#include "host/memory/page_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <vector>

namespace spillway {
namespace {

using ::testing::HasSubstr;

// Items of 1 KiB, four per page.
constexpr int64_t kItemBytes = 1024;
constexpr int64_t kPageItems = 4;

class PageTableTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSlabs = 4;

  static int ReadItem(const PageTable& table, int64_t item) {
    int value;
    std::memcpy(&value, table.Page(item / kPageItems) + item % kPageItems * kItemBytes,
                sizeof(value));
    return value;
  }
  static void WriteItem(PageTable& table, int64_t item, int value) {
    std::memcpy(table.Page(item / kPageItems) + item % kPageItems * kItemBytes, &value,
                sizeof(value));
  }
  static void Append(PageTable& table, int64_t begin, int64_t end, int first) {
    ASSERT_TRUE(table.PrepareWrite(begin, end).ok());
    for (int64_t i = begin; i < end; ++i) WriteItem(table, i, first + static_cast<int>(i - begin));
  }

  MemoryBudget budget_{kSlabs * kSlabBytes};
  std::unique_ptr<Arena> arena_ =
      *Arena::Create({.limit_bytes = kSlabs * kSlabBytes, .extent_bytes = kSlabBytes}, &budget_);
  PagePool pool_{arena_.get(), kItemBytes* kPageItems};
};

TEST_F(PageTableTest, GrowsByWholePagesAndTruncates) {
  PageTable table(&pool_, kPageItems);
  ASSERT_TRUE(table.PrepareWrite(0, 1).ok());
  EXPECT_EQ(table.page_count(), 1);
  ASSERT_TRUE(table.PrepareWrite(1, 4).ok());
  EXPECT_EQ(table.page_count(), 1);
  ASSERT_TRUE(table.PrepareWrite(4, 13).ok());
  EXPECT_EQ(table.page_count(), 4);
  EXPECT_EQ(table.bytes(), 4 * 4096);
  ASSERT_TRUE(table.PrepareWrite(13, 13).ok());
  table.Truncate(5);
  EXPECT_EQ(table.page_count(), 2);
  table.Truncate(4);
  EXPECT_EQ(table.page_count(), 1);
  table.Clear();
  EXPECT_EQ(pool_.used_page_count(), 0);
}

// Whoever learns of the new page in `installed` may still name the old one until then.
TEST_F(PageTableTest, AReplacedPageIsKeptUntilTheNewOneIsKnown) {
  PageTable table(&pool_, kPageItems);
  Append(table, 0, 6, 100);
  PageTable fork = table.Share(6);
  auto staged = fork.StageWrite(6, 9);
  ASSERT_TRUE(staged.ok());
  // The other owner goes, so that Install() releases the last reference.
  const PageRef old = table.ref(1);
  table.Clear();
  std::vector<int64_t> positions;
  fork.Install(*std::move(staged), [&](int64_t position, PageRef page) {
    positions.push_back(position);
    EXPECT_NE(page.index, old.index);
    if (position != 1) return;
    EXPECT_NE(pool_.Data(old), nullptr);
    int copied;
    std::memcpy(&copied, pool_.Data(page) + kItemBytes, sizeof(copied));
    EXPECT_EQ(copied, 105);
  });
  EXPECT_THAT(positions, ::testing::ElementsAre(1, 2));
  EXPECT_EQ(pool_.Data(old), nullptr);
}

TEST_F(PageTableTest, PagesOfOneTableAreAdjacent) {
  PageTable table(&pool_, kPageItems);
  ASSERT_TRUE(table.PrepareWrite(0, 40).ok());
  ASSERT_TRUE(table.PrepareWrite(40, 80).ok());
  for (int64_t i = 1; i < table.page_count(); ++i) {
    EXPECT_EQ(table.Page(i), table.Page(i - 1) + pool_.page_bytes());
  }
}

TEST_F(PageTableTest, AForkCopiesOnlyThePageThatItAppendsTo) {
  PageTable parent(&pool_, kPageItems);
  Append(parent, 0, 10, 100);
  PageTable child = parent.Share(9);
  EXPECT_EQ(pool_.used_page_count(), 3);
  EXPECT_EQ(child.NewPageCount(9, 10), 1);
  Append(child, 9, 10, 999);
  EXPECT_EQ(pool_.used_page_count(), 4);
  EXPECT_EQ(ReadItem(child, 8), 108);
  EXPECT_EQ(ReadItem(child, 9), 999);
  EXPECT_EQ(ReadItem(parent, 9), 109);
  EXPECT_EQ(child.Page(1), parent.Page(1));
  EXPECT_NE(child.Page(2), parent.Page(2));
  // The parent is now the only user of its last page, and writes in place.
  EXPECT_EQ(parent.NewPageCount(10, 12), 0);
}

TEST_F(PageTableTest, ASharedPageThatIsOverwrittenWhollyIsNotCopied) {
  PageTable parent(&pool_, kPageItems);
  Append(parent, 0, 8, 100);
  PageTable child = parent.Share(8);
  // The write begins at the first item of page 1. If the old page were copied, the new page would
  // hold its items.
  child.Truncate(4);
  PageTable replaced = parent.Share(8);
  ASSERT_TRUE(replaced.PrepareWrite(4, 5).ok());
  EXPECT_NE(replaced.Page(1), parent.Page(1));
  WriteItem(replaced, 4, -1);
  EXPECT_EQ(ReadItem(replaced, 3), 103);
  EXPECT_EQ(ReadItem(parent, 4), 104);
  EXPECT_NE(ReadItem(replaced, 7), 107);
}

TEST_F(PageTableTest, OutOfMemoryChangesNothing) {
  PageTable full(&pool_, kPageItems);
  const int64_t pages = pool_.free_page_count();
  PageTable parent(&pool_, kPageItems);
  Append(parent, 0, 6, 100);
  PageTable child = parent.Share(6);
  Append(full, 0, (pages - 3) * kPageItems, 0);
  EXPECT_EQ(pool_.free_page_count(), 1);
  const std::byte* page = child.Page(1);
  // One page for the copy, and two new pages.
  const absl::Status status = child.PrepareWrite(6, 16);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("12288"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("4096"));
  EXPECT_EQ(child.page_count(), 2);
  EXPECT_EQ(child.Page(1), page);
  EXPECT_EQ(pool_.free_page_count(), 1);
  EXPECT_FALSE(child.PrepareWrite(6, int64_t{1} << 62).ok());
  // The spare page in a slab that the pool holds counts as free.
  EXPECT_TRUE(child.PrepareWrite(6, 8).ok());
  EXPECT_EQ(pool_.free_page_count(), 0);
}

TEST_F(PageTableTest, AStagedWriteThatIsDroppedIsGivenBack) {
  PageTable table(&pool_, kPageItems);
  {
    const auto staged = table.StageWrite(0, 40);
    ASSERT_TRUE(staged.ok());
    EXPECT_EQ(pool_.used_page_count(), 10);
  }
  EXPECT_EQ(pool_.used_page_count(), 0);
  EXPECT_EQ(table.page_count(), 0);
}

TEST_F(PageTableTest, MovesLeaveNothingBehind) {
  PageTable a(&pool_, kPageItems), b(&pool_, kPageItems);
  Append(a, 0, 8, 1);
  Append(b, 0, 4, 50);
  b = std::move(a);
  EXPECT_EQ(pool_.used_page_count(), 2);
  EXPECT_EQ(ReadItem(b, 5), 6);
  const PageTable c = std::move(b);
  EXPECT_EQ(ReadItem(c, 0), 1);
  EXPECT_EQ(pool_.used_page_count(), 2);
}

// Compares random appends, forks, truncations and drops with plain vectors.
TEST_F(PageTableTest, BehavesAsVectorsOfItems) {
  struct Pair {
    PageTable table;
    std::vector<int> model;
  };
  std::mt19937 rng(11);
  std::vector<Pair> live;
  int next = 1;
  int refused = 0;
  for (int step = 0; step < 6000; ++step) {
    const int action = static_cast<int>(rng() % 10);
    if (live.empty() || (action == 0 && live.size() < 12)) {
      live.push_back({PageTable(&pool_, kPageItems), {}});
      continue;
    }
    const size_t at = rng() % live.size();
    Pair& p = live[at];
    const auto size = static_cast<int64_t>(p.model.size());
    if (action < 6) {
      const int64_t count = rng() % 12 == 0 ? 1500 : rng() % 11;
      const absl::Status status = p.table.PrepareWrite(size, size + count);
      if (!status.ok()) {
        ++refused;
        ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      } else {
        for (int64_t i = 0; i < count; ++i, ++next) {
          WriteItem(p.table, size + i, next);
          p.model.push_back(next);
        }
      }
    } else if (action == 6) {
      p.model.resize(rng() % (size + 1));
      p.table.Truncate(static_cast<int64_t>(p.model.size()));
    } else if (action == 7 && live.size() < 12) {
      const int64_t kept = static_cast<int64_t>(rng() % (size + 1));
      PageTable fork = p.table.Share(kept);
      std::vector<int> model(p.model.begin(), p.model.begin() + kept);
      live.push_back({std::move(fork), std::move(model)});
    } else if (action == 8) {
      live.erase(live.begin() + static_cast<int64_t>(at));
    }
    if (step % 20 == 0) {
      for (const Pair& q : live) {
        ASSERT_EQ(q.table.page_count(),
                  (static_cast<int64_t>(q.model.size()) + kPageItems - 1) / kPageItems);
        for (size_t i = 0; i < q.model.size(); ++i) {
          ASSERT_EQ(ReadItem(q.table, static_cast<int64_t>(i)), q.model[i]) << "step " << step;
        }
      }
    }
  }
  EXPECT_GT(refused, 0);
  live.clear();
  EXPECT_EQ(pool_.used_page_count(), 0);
  EXPECT_EQ(arena_->statistics().used_bytes, 0);
}

}  // namespace
}  // namespace spillway
