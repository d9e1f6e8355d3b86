#include "host/memory/layer_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "host/memory/layer_record.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = std::byte(rng());
  return bytes;
}

class LayerRowsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSlabs = 2;
  static constexpr int kHeads = 4;

  static ModelSpec Spec() {
    ModelSpec spec;
    spec.layer_count = 1;
    spec.query_head_count = kHeads;
    spec.kv_head_count = kHeads;
    spec.head_dim = 64;
    return spec;
  }
  RowSource Dense(const std::vector<std::byte>& rows, int64_t count) const {
    return RowSource::Dense(rows.data(), count, spec_.row_bytes() / 2);
  }
  // Appends `count` tokens of random bytes. Returns K and V.
  std::pair<std::vector<std::byte>, std::vector<std::byte>> Append(LayerRows& rows, int64_t count,
                                                                   uint32_t seed) {
    const size_t bytes = static_cast<size_t>(kHeads * count * spec_.row_bytes() / 2);
    auto k = RandomBytes(bytes, seed), v = RandomBytes(bytes, seed + 1000);
    const int64_t start = rows.token_count();
    EXPECT_TRUE(rows.PrepareAppend(count).ok());
    const int64_t cut = count / 3;
    for (int h = 0; h < kHeads; ++h) {
      rows.WriteRows(h, start, cut, count, Dense(k, count), Dense(v, count));
      rows.WriteRows(h, start, 0, cut, Dense(k, count), Dense(v, count));
    }
    rows.Commit(start + count);
    return {std::move(k), std::move(v)};
  }

  const ModelSpec spec_ = Spec();
  MemoryBudget budget_{kSlabs * kSlabBytes};
  std::unique_ptr<Arena> arena_ =
      *Arena::Create({.limit_bytes = kSlabs * kSlabBytes, .extent_bytes = kSlabBytes}, &budget_);
  PagePool pool_{arena_.get(), kPageTokenCount* Spec().row_bytes()};
};

TEST_F(LayerRowsTest, TellsWhichRowsLieTogether) {
  LayerRows one(&pool_, spec_);
  Append(one, 300, 1);  // three pages a head
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(one.AdjacentRows(h, 0, 300), 300);
    EXPECT_EQ(one.AdjacentRows(h, 130, 100), 100);
    EXPECT_EQ(one.AdjacentRows(h, 299, 1), 1);
  }
  // The heads took turns, so the pages of each head are apart.
  LayerRows other(&pool_, spec_);
  for (int i = 0; i < 3; ++i) Append(other, kPageTokenCount, 2 + i);
  EXPECT_EQ(other.AdjacentRows(0, 5, 300), kPageTokenCount - 5);
  EXPECT_EQ(other.AdjacentRows(0, kPageTokenCount, 10), 10);
}

TEST_F(LayerRowsTest, RowsHoldKeyThenValueOfTheirHead) {
  LayerRows rows(&pool_, spec_);
  const auto first = Append(rows, 200, 1);
  const auto second = Append(rows, 77, 2);
  ASSERT_EQ(rows.token_count(), 277);
  const int64_t half = rows.row_bytes() / 2;
  for (int h = 0; h < kHeads; ++h) {
    for (int64_t t = 0; t < 277; ++t) {
      const auto& [k, v] = t < 200 ? first : second;
      const int64_t source = (t < 200 ? h * 200 + t : h * 77 + t - 200) * half;
      for (int64_t i = 0; i < half; ++i) {
        ASSERT_EQ(rows.Row(h, t)[i], k[source + i]);
        ASSERT_EQ(rows.Row(h, t)[half + i], v[source + i]);
      }
    }
  }
  EXPECT_EQ(rows.bytes(), int64_t{kHeads} * 3 * kPageTokenCount * rows.row_bytes());
}

TEST_F(LayerRowsTest, EqualsSeesEveryByte) {
  LayerRows rows(&pool_, spec_);
  Append(rows, 130, 5);
  auto [k, v] = Append(rows, 20, 6);
  EXPECT_TRUE(rows.Equals(130, 20, Dense(k, 20), Dense(v, 20)));
  EXPECT_FALSE(rows.Equals(129, 20, Dense(k, 20), Dense(v, 20)));
  EXPECT_TRUE(rows.Equals(130, 0, Dense(k, 0), Dense(v, 0)));
  k.back() ^= std::byte{1};
  EXPECT_FALSE(rows.Equals(130, 20, Dense(k, 20), Dense(v, 20)));
  k.back() ^= std::byte{1};
  v.front() ^= std::byte{128};
  EXPECT_FALSE(rows.Equals(130, 20, Dense(k, 20), Dense(v, 20)));
}

TEST_F(LayerRowsTest, RollbackGivesBackWhatWasPrepared) {
  LayerRows rows(&pool_, spec_);
  const auto [k, v] = Append(rows, 10, 3);
  const int64_t before = pool_.used_page_count();
  ASSERT_TRUE(rows.PrepareAppend(500).ok());
  EXPECT_GT(pool_.used_page_count(), before);
  rows.Rollback();
  EXPECT_EQ(pool_.used_page_count(), before);
  EXPECT_EQ(rows.token_count(), 10);
  EXPECT_TRUE(rows.Equals(0, 10, Dense(k, 10), Dense(v, 10)));
}

TEST_F(LayerRowsTest, AnAppendThatFailsOnALaterHeadLeavesNothing) {
  LayerRows rows(&pool_, spec_);
  Append(rows, 10, 3);
  LayerRows fork = rows.Share(10);
  // Leaves pages for the copies of only three of the four heads.
  std::vector<PageRef> held;
  while (pool_.free_page_count() > 3) held.push_back(*pool_.Allocate());
  const int64_t before = pool_.used_page_count();
  const absl::Status status = fork.PrepareAppend(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(4 * pool_.page_bytes())));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(3 * pool_.page_bytes())));
  EXPECT_EQ(pool_.used_page_count(), before);
  for (int h = 0; h < kHeads; ++h) EXPECT_EQ(fork.Page(h, 0), rows.Page(h, 0));
  pool_.Release(held.back());
  held.pop_back();
  EXPECT_TRUE(fork.PrepareAppend(1).ok());
  for (const PageRef page : held) pool_.Release(page);
}

TEST_F(LayerRowsTest, AbsurdCountsAreRefused) {
  LayerRows rows(&pool_, spec_);
  EXPECT_EQ(rows.PrepareAppend(int64_t{1} << 62).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_.used_page_count(), 0);
}

TEST_F(LayerRowsTest, ARecordFollowsTheCopyOfASharedPage) {
  const ScratchFolder scratch;
  MemoryBudget budget(int64_t{16} << 20);
  const auto file = *RecordFile::Open(
      *ArenaFile::Open(*ArenaFolder::Open(scratch.path()), "records"), 1, &budget);
  file->FreeUnclaimed();
  LayerRecord record = *LayerRecord::Create(file.get(), kHeads);
  LayerRecord fork_record = *LayerRecord::Create(file.get(), kHeads);
  LayerRows rows(&pool_, spec_);
  ASSERT_TRUE(rows.Record(&record).ok());
  Append(rows, 140, 1);
  rows.Keep(140);
  LayerRows fork = rows.Share(140);
  ASSERT_TRUE(fork.Record(&fork_record, &record).ok());
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(fork_record.PageIndex(h, 1), rows.PageIndex(h, 1));
  }
  Append(fork, 3, 2);
  fork.Keep(143);
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(fork_record.PageIndex(h, 0), rows.PageIndex(h, 0));
    EXPECT_NE(fork.PageIndex(h, 1), rows.PageIndex(h, 1));
    EXPECT_EQ(fork_record.PageIndex(h, 1), fork.PageIndex(h, 1));
    EXPECT_EQ(record.PageIndex(h, 1), rows.PageIndex(h, 1));
  }
  EXPECT_EQ(fork_record.token_count(), 143);
  EXPECT_EQ(record.token_count(), 140);
  // The sum is of the rows in the copy.
  EXPECT_EQ(fork_record.summed()->token_count, 143);
  EXPECT_EQ(fork_record.summed()->open_sum, fork.SumOfOpenRows(143));
}

TEST_F(LayerRowsTest, ForksDivergeAndTruncateAlone) {
  LayerRows rows(&pool_, spec_);
  const auto [k, v] = Append(rows, 140, 8);
  LayerRows fork = rows.Share(135);
  const auto [fork_k, fork_v] = Append(fork, 5, 9);
  EXPECT_TRUE(rows.Equals(0, 140, Dense(k, 140), Dense(v, 140)));
  EXPECT_TRUE(fork.Equals(135, 5, Dense(fork_k, 5), Dense(fork_v, 5)));
  rows.Truncate(3);
  EXPECT_EQ(rows.token_count(), 3);
  const auto [again_k, again_v] = Append(rows, 20, 10);
  EXPECT_TRUE(rows.Equals(3, 20, Dense(again_k, 20), Dense(again_v, 20)));
  EXPECT_TRUE(fork.Equals(135, 5, Dense(fork_k, 5), Dense(fork_v, 5)));
  rows.Truncate(0);
  fork.Truncate(0);
  EXPECT_EQ(arena_->statistics().used_bytes, 0);
}

}  // namespace
}  // namespace spillway
