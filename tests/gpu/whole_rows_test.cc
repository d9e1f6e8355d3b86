#include "gpu/device/whole_rows.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>
#include <vector>

// Copies of all rows, as a GPU would hold them, in an arena of host memory.
namespace spillway::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr bool kNoRoom = false;

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = 4;
  spec.kv_head_count = 2;
  spec.head_dim = 64;
  spec.dtype = DType::kF32;
  Normalize(spec);
  return spec;
}

// Memory for 32 pages: a page of 128 rows of 512 bytes is 64 KiB.
struct Memory {
  const ModelSpec spec = Spec();
  MemoryBudget budget{16 * kMiB};
  std::unique_ptr<Arena> arena =
      Arena::Create({.limit_bytes = 2 * kMiB, .extent_bytes = 2 * kMiB}, &budget).value();
  PagePool pool{arena.get(), kPageTokenCount* spec.row_bytes()};
};

int64_t Pages(const Memory& memory) { return memory.pool.used_page_count(); }

TEST(WholeRows, GrowAsFarAsThereIsRoomAndNoFurther) {
  Memory memory;
  WholeRowsOfLayer rows(memory.spec, &memory.pool);
  int asked = 0;
  const auto refuse = [&] {
    ++asked;
    return kNoRoom;
  };
  rows.Prepare(0, 1000, refuse);
  EXPECT_EQ(rows.end(), 1024);
  EXPECT_EQ(Pages(memory), 16);
  EXPECT_EQ(rows.FirstUnfilled(1000), 0);
  rows.SetFilled(1000);
  EXPECT_EQ(rows.FirstUnfilled(1000), 1000);
  EXPECT_FALSE(rows.LacksRows(1000));

  // 17 pages per head do not fit: the present pages stay, and the rest of the last page is used.
  rows.Prepare(1000, 2100, refuse);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(rows.end(), 1024);
  EXPECT_TRUE(rows.Lacks(2100));
  EXPECT_EQ(rows.FirstUnfilled(2100), 1000);
  EXPECT_NE(rows.Row(1, 1023), nullptr);
  EXPECT_EQ(rows.Row(1, 1024), nullptr);
  rows.SetFilled(2100);
  EXPECT_EQ(rows.FirstUnfilled(2100), 2100);
  // It does not ask again, not even if there were memory.
  rows.Prepare(2100, 2101, refuse);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(rows.end(), 1024);

  // A sequence so short that nothing is lacking can grow again.
  rows.Truncate(900);
  rows.Prepare(900, 1500, refuse);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(rows.end(), 1536);
  EXPECT_EQ(rows.FirstUnfilled(1500), 900);
}

TEST(WholeRows, AskForRoomUntilThereIsSome) {
  Memory memory;
  std::vector<std::unique_ptr<WholeRowsOfLayer>> others;
  for (int i = 0; i < 4; ++i) {
    others.push_back(std::make_unique<WholeRowsOfLayer>(memory.spec, &memory.pool));
    others.back()->Prepare(0, 512, [] { return kNoRoom; });
    ASSERT_EQ(others.back()->end(), 512);
  }
  EXPECT_EQ(Pages(memory), 32);
  WholeRowsOfLayer rows(memory.spec, &memory.pool);
  int asked = 0;
  rows.Prepare(0, 1024, [&] {
    others[asked++]->GiveUp();
    return true;
  });
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(rows.end(), 1024);
  EXPECT_EQ(others[0]->end(), 0);
  EXPECT_EQ(others[1]->bytes(), 0);
  EXPECT_EQ(others[2]->end(), 512);

  // Copies that were given up take nothing before Resume, and then all that is lacking.
  rows.GiveUp();
  others[0]->Prepare(512, 513, [] { return kNoRoom; });
  EXPECT_EQ(others[0]->end(), 0);
  others[0]->Resume();
  others[0]->Prepare(513, 514, [] { return kNoRoom; });
  EXPECT_EQ(others[0]->end(), 640);
  EXPECT_EQ(others[0]->FirstUnfilled(514), 0);
}

TEST(WholeRows, ForksShareThePagesAndWriteTheirOwn) {
  Memory memory;
  const auto refuse = [] { return kNoRoom; };
  WholeRowsOfLayer one(memory.spec, &memory.pool);
  one.Prepare(0, 700, refuse);
  one.SetFilled(700);
  WholeRowsOfLayer two(one, 650);
  EXPECT_EQ(two.end(), 768);
  EXPECT_EQ(two.FirstUnfilled(650), 650);
  EXPECT_EQ(Pages(memory), 12);
  EXPECT_EQ(two.Page(0, 5), one.Page(0, 5));
  two.Prepare(650, 651, refuse);
  EXPECT_EQ(two.Page(0, 4), one.Page(0, 4));
  EXPECT_NE(two.Page(0, 5), one.Page(0, 5));
  EXPECT_NE(two.Page(1, 5), one.Page(1, 5));
  EXPECT_EQ(two.TakeChangedPage(), 0);
  EXPECT_EQ(two.TakeChangedPage(), INT64_MAX);
  // What `one` gives up, `two` still has.
  one.GiveUp();
  EXPECT_EQ(Pages(memory), 12);
  EXPECT_EQ(two.end(), 768);

  // If a shared page cannot be copied, it is given up with all pages before it.
  WholeRowsOfLayer three(two, 651);
  std::vector<PageRef> taken;
  for (;;) {
    const auto page = memory.pool.Allocate();
    if (!page.ok()) break;
    taken.push_back(*page);
  }
  three.Prepare(651, 652, refuse);
  EXPECT_EQ(three.end(), 0);
  EXPECT_EQ(two.end(), 768);
  for (const PageRef page : taken) memory.pool.Release(page);
}

TEST(WholeRows, WithoutAPoolHoldNothing) {
  const ModelSpec spec = Spec();
  WholeRowsOfLayer rows(spec, nullptr);
  rows.Prepare(0, 1000, [] { return true; });
  rows.Resume();
  rows.Prepare(1000, 2000, [] { return true; });
  EXPECT_EQ(rows.end(), 0);
  EXPECT_EQ(rows.bytes(), 0);
  EXPECT_FALSE(rows.Lacks(2000));
  EXPECT_EQ(rows.FirstUnfilled(2000), 2000);
  EXPECT_EQ(rows.Row(0, 0), nullptr);
  rows.Truncate(10);
  EXPECT_EQ(rows.end(), 0);
  rows.TakeChangedPage();
  rows.Truncate(5);
  EXPECT_EQ(rows.TakeChangedPage(), INT64_MAX);
}

}  // namespace
}  // namespace spillway::cuda
