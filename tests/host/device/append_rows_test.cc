#include "host/device/append_rows.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "host/memory/layer_record.h"
#include "host/memory/row_check.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

constexpr int kHeads = 3;
constexpr int64_t kDim = 32;

// Rows of one layer with a record.
class AppendRowsTest : public ::testing::Test {
 protected:
  static ModelSpec Spec() {
    ModelSpec spec;
    spec.layer_count = 1;
    spec.query_head_count = kHeads;
    spec.kv_head_count = kHeads;
    spec.head_dim = kDim;
    spec.dtype = DType::kF32;
    return spec;
  }

  absl::Status Append(int64_t count, bool bad, bool shared) {
    std::vector<float> k(static_cast<size_t>(kHeads * count * kDim)), v(k.size());
    for (float& x : k) x = static_cast<float>(random_());
    for (float& x : v) x = static_cast<float>(random_());
    if (bad) v[random_() % v.size()] = std::numeric_limits<float>::infinity();
    AppendWork work;
    work.rows = &rows_;
    work.start = rows_.token_count();
    work.count = count;
    work.k = RowSource::Dense(k.data(), count, kDim * sizeof(float));
    work.v = RowSource::Dense(v.data(), count, kDim * sizeof(float));
    work.shared_source = shared;
    EXPECT_TRUE(rows_.PrepareAppend(count).ok());
    return AppendRows(Spec(), 0, work);
  }

  // The record's sums are those of the rows.
  void ExpectSummed() {
    const int64_t length = rows_.token_count();
    const std::optional<LayerRecord::Summed> summed = record_.summed();
    ASSERT_TRUE(summed.has_value());
    EXPECT_EQ(record_.token_count(), length);
    EXPECT_EQ(summed->token_count, length);
    EXPECT_EQ(summed->open_sum, rows_.SumOfOpenRows(length));
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t page = 0; page < length / kPageTokenCount; ++page) {
        ASSERT_EQ(record_.PageSum(h, page), rows_.SumOfPage(h, page)) << page;
      }
    }
  }

  ScratchFolder scratch_;
  MemoryBudget budget_{int64_t{64} << 20};
  std::unique_ptr<RecordFile> file_ = [this] {
    const ArenaFolder folder = *ArenaFolder::Open(scratch_.path());
    auto file = *RecordFile::Open(*ArenaFile::Open(folder, "records"), 1, &budget_);
    file->FreeUnclaimed();
    return file;
  }();
  LayerRecord record_ = *LayerRecord::Create(file_.get(), kHeads);
  std::unique_ptr<Arena> arena_ =
      *Arena::Create({.limit_bytes = int64_t{32} << 20, .extent_bytes = kSlabBytes}, &budget_);
  PagePool pool_{arena_.get(), kPageTokenCount* Spec().row_bytes()};
  LayerRows rows_{&pool_, Spec()};
  std::mt19937 random_{4};
};

TEST_F(AppendRowsTest, ChecksumsFollowAppendsAndCuts) {
  ASSERT_TRUE(rows_.Record(&record_).ok());
  ExpectSummed();
  for (int i = 0; i < 300; ++i) {
    const int64_t count = 1 + static_cast<int64_t>(random_() % (random_() % 3 == 0 ? 500 : 3));
    const int64_t length = rows_.token_count();
    switch (random_() % 4) {
      case 0:
        rows_.Truncate(std::max<int64_t>(0, length - count));
        break;
      case 1:  // its rows are in the pages when it fails
        EXPECT_FALSE(Append(count, /*bad=*/true, /*shared=*/true).ok());
        rows_.Truncate(length);
        break;
      default:
        if (length + count > 3000) break;
        ASSERT_TRUE(Append(count, /*bad=*/false, random_() % 2 == 0).ok());
        rows_.Keep(rows_.token_count());
    }
    ExpectSummed();
  }
}

// A decoder on a device writes the length itself, and the host sums the rows later.
TEST_F(AppendRowsTest, ChecksumsMayFollowTheLength) {
  ASSERT_TRUE(rows_.Record(&record_).ok());
  ASSERT_TRUE(Append(127, false, false).ok());
  rows_.Keep(127);
  for (int64_t length = 128; length < 132; ++length) {
    ASSERT_TRUE(rows_.PrepareAppend(1).ok());
    rows_.Commit(length);
    *rows_.length_word() = LayerRecord::LengthWord(length);
    // Killed here: what is summed is right, and the other rows are not checked.
    EXPECT_EQ(record_.token_count(), length);
    EXPECT_EQ(record_.summed()->token_count, length - 1);
    RowCheck now;
    now.Add(rows_, length);
    now.Run();
    EXPECT_EQ(now.Find(rows_, record_, length).token_count, length);
    rows_.KeepWritten(length);
    ExpectSummed();
  }
}

}  // namespace
}  // namespace spillway
