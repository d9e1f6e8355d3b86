#include "host/memory/retired_pages.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace spillway {
namespace {

class RetiredPagesTest : public ::testing::Test {
 protected:
  // A table of one page, in a list.
  std::vector<PageTable> OnePage() {
    std::vector<PageTable> tables;
    EXPECT_TRUE(tables.emplace_back(&pool_, 4).PrepareWrite(0, 4).ok());
    return tables;
  }

  MemoryBudget budget_{kSlabBytes};
  std::unique_ptr<Arena> arena_ =
      *Arena::Create({.limit_bytes = kSlabBytes, .extent_bytes = kSlabBytes}, &budget_);
  PagePool pool_{arena_.get(), 4096};
  RetiredPages retired_;
};

TEST_F(RetiredPagesTest, FreeAtOnceIfNothingRuns) {
  EXPECT_TRUE(retired_.idle());
  EXPECT_TRUE(retired_.Retire(OnePage()));
  EXPECT_EQ(pool_.used_page_count(), 0);
  const auto work = retired_.Begin();
  EXPECT_FALSE(retired_.idle());
  retired_.End(work);
  EXPECT_TRUE(retired_.idle());
  EXPECT_TRUE(retired_.Retire(OnePage()));
  EXPECT_EQ(pool_.used_page_count(), 0);
}

TEST_F(RetiredPagesTest, KeptUntilAllEarlierWorkHasEnded) {
  const auto first = retired_.Begin();
  const auto second = retired_.Begin();
  EXPECT_FALSE(retired_.Retire(OnePage()));
  const auto later = retired_.Begin();
  EXPECT_FALSE(retired_.Retire(OnePage()));
  EXPECT_EQ(pool_.used_page_count(), 2);
  // In another order than they began.
  retired_.End(second);
  EXPECT_EQ(pool_.used_page_count(), 2);
  retired_.End(first);
  // `later` began after the first page was retired.
  EXPECT_EQ(pool_.used_page_count(), 1);
  retired_.End(later);
  EXPECT_EQ(pool_.used_page_count(), 0);
}

}  // namespace
}  // namespace spillway
