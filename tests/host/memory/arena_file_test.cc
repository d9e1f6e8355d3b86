// An arena in a file, and the folder that contains the file.
#include "host/memory/arena_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "host/memory/arena.h"
#include "host/memory/arena_folder.h"
#include "host/memory/page_pool.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kS = kSlabBytes;

std::string Said(const absl::Status& status) { return std::string(status.message()); }

class ArenaFileTest : public ::testing::Test {
 protected:
  // Opens the arena as a process does when it starts.
  std::unique_ptr<Arena> Open(int64_t slabs = 16) {
    const ArenaFolder folder = *ArenaFolder::Open(scratch.path());
    ArenaOptions options;
    options.limit_bytes = slabs * kS;
    options.extent_bytes = 2 * kS;
    options.touch_thread_count = 1;
    return *Arena::Create(options, &budget, {}, *ArenaFile::Open(folder, "rows"));
  }
  // Bytes that the file system holds for the file.
  int64_t HeldBytes() const {
    struct stat info {};
    EXPECT_EQ(stat(scratch.File("rows").c_str(), &info), 0);
    return info.st_blocks * 512;
  }

  ScratchFolder scratch;
  MemoryBudget budget{64 * kS};
};

TEST_F(ArenaFileTest, WhatIsRestoredKeepsItsContentsAndTheRestGoes) {
  {
    auto arena = Open();
    std::byte* const base = *arena->AllocateSlabs(6);
    ASSERT_EQ(base, arena->base());
    for (int64_t slab = 0; slab < 6; ++slab) {
      std::memset(base + slab * kS, static_cast<int>(slab + 1), kS);
    }
    EXPECT_GE(HeldBytes(), 6 * kS);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
  // The process is gone. Its file stays, with all its contents.
  EXPECT_GE(HeldBytes(), 6 * kS);

  auto arena = Open();
  const std::vector<SlabRun> runs = {{1, 2}, {4, 1}};
  ASSERT_TRUE(arena->Restore(runs).ok());
  EXPECT_EQ(budget.used_bytes(), 3 * kS);
  EXPECT_EQ(HeldBytes(), 3 * kS);
  EXPECT_EQ(arena->statistics().used_bytes, 3 * kS);
  EXPECT_EQ(arena->free_bytes(), 13 * kS);
  for (const int64_t slab : {1, 2, 4}) {
    for (const int64_t at : {int64_t{0}, kS / 2, kS - 1}) {
      EXPECT_EQ(arena->base()[slab * kS + at], static_cast<std::byte>(slab + 1)) << slab;
    }
  }
  // Later allocations return none of the restored slabs.
  for (int i = 0; i < 13; ++i) {
    const auto slab = arena->AllocateSlabs(1);
    ASSERT_TRUE(slab.ok()) << slab.status();
    const int64_t number = (*slab - arena->base()) / kS;
    EXPECT_TRUE(number != 1 && number != 2 && number != 4) << number;
    std::memset(*slab, 0x55, kS);
  }
  EXPECT_FALSE(arena->AllocateSlabs(1).ok());
  EXPECT_EQ(arena->base()[4 * kS], std::byte{5});
  // Restored slabs are freed like others.
  arena->FreeSlabs(arena->base() + kS, 2);
  const auto again = arena->AllocateSlabs(2);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, arena->base() + kS);
}

TEST_F(ArenaFileTest, MemoryThatIdlesGoesBackToTheFileSystem) {
  auto arena = Open();
  std::byte* const base = *arena->AllocateSlabs(8);
  std::memset(base, 1, 8 * kS);
  EXPECT_EQ(HeldBytes(), 8 * kS);
  arena->FreeSlabs(base, 8);
  for (int i = 0; i < 100; ++i) arena->GiveBackIdle();
  EXPECT_EQ(HeldBytes(), 0);
  // It can be committed again and written. Its contents need not be zero.
  std::byte* const more = *arena->AllocateSlabs(8);
  std::memset(more, 2, 8 * kS);
  EXPECT_EQ(HeldBytes(), 8 * kS);
}

TEST_F(ArenaFileTest, RestoreRefusesMoreThanTheBudget) {
  {
    auto arena = Open();
    ASSERT_TRUE(arena->AllocateSlabs(5).ok());
  }
  MemoryBudget small(4 * kS);
  const ArenaFolder folder = *ArenaFolder::Open(scratch.path());
  ArenaOptions options;
  options.limit_bytes = 8 * kS;
  auto arena = *Arena::Create(options, &small, {}, *ArenaFile::Open(folder, "rows"));
  const std::vector<SlabRun> runs = {{0, 5}};
  const absl::Status status = arena->Restore(runs);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(Said(status), HasSubstr("rows that were kept needs 10485760 bytes"));
  EXPECT_EQ(HeldBytes(), 5 * kS);
}

TEST_F(ArenaFileTest, RowsThatADeviceDoesNotTakeAreKeptForTheNextProcess) {
  {
    auto arena = Open();
    std::memset(*arena->AllocateSlabs(2), 7, 2 * kS);
  }
  const std::vector<SlabRun> runs = {{0, 2}};
  {
    const ArenaFolder folder = *ArenaFolder::Open(scratch.path());
    Arena::ExtentObserver observer;
    observer.committed = [](std::span<std::byte>) { return absl::InternalError("cannot pin"); };
    auto arena = *Arena::Create({.limit_bytes = 16 * kS}, &budget, observer,
                                *ArenaFile::Open(folder, "rows"));
    EXPECT_TRUE(absl::IsInternal(arena->Restore(runs)));
  }
  auto arena = Open();
  ASSERT_TRUE(arena->Restore(runs).ok());
  EXPECT_EQ(arena->base()[0], std::byte{7});
  EXPECT_EQ(arena->base()[2 * kS - 1], std::byte{7});
}

TEST_F(ArenaFileTest, PagesThatWereHandedOutAreAdopted) {
  const int64_t page_bytes = 2 * kS / 5 / 64 * 64;  // two slabs are five pages and a bit
  std::vector<PageRef> pages;
  {
    auto arena = Open();
    PagePool pool(arena.get(), page_bytes);
    for (int i = 0; i < 7; ++i) {
      pages.push_back(*pool.Allocate());
      std::memset(pool.Data(pages[i]), i + 1, static_cast<size_t>(page_bytes));
    }
  }
  auto arena = Open();
  PagePool pool(arena.get(), page_bytes);
  const SlabRun run = *pool.SlabsOf(pages[6].index);
  EXPECT_EQ(run.count, pool.slab_count());
  const std::vector<SlabRun> runs = {run};
  ASSERT_TRUE(arena->Restore(runs).ok());
  const PageRef page = *pool.Adopt(pages[6].index);
  EXPECT_EQ(page.index, pages[6].index);
  ASSERT_NE(pool.Data(page), nullptr);
  EXPECT_EQ(pool.Data(page)[page_bytes - 1], std::byte{7});
  EXPECT_EQ(pool.used_page_count(), 1);
  EXPECT_FALSE(pool.IsShared(page));
  // A page of two sequences is adopted twice.
  const PageRef same = *pool.Adopt(pages[6].index);
  EXPECT_EQ(same, page);
  EXPECT_TRUE(pool.IsShared(page));
  EXPECT_EQ(pool.used_page_count(), 1);
  // The other pages of its slabs are free.
  const PageRef other = *pool.Allocate(page);
  EXPECT_EQ(pool.SlabsOf(other.index)->first, run.first);
  EXPECT_NE(other.index, page.index);
  pool.Release(other);
  pool.Release(page);
  EXPECT_NE(pool.Data(page), nullptr);
  pool.Release(page);
  EXPECT_EQ(pool.Data(page), nullptr);
  EXPECT_EQ(arena->statistics().used_bytes, 0);
  EXPECT_TRUE(absl::IsDataLoss(pool.Adopt(0xFFFFFFFF).status()));
}

TEST_F(ArenaFileTest, AFolderIsForOne) {
  {
    const auto folder = ArenaFolder::Open(scratch.path());
    ASSERT_TRUE(folder.ok()) << folder.status();
    const absl::Status second = ArenaFolder::Open(scratch.path()).status();
    EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
    EXPECT_THAT(Said(second), HasSubstr(std::to_string(getpid())));
  }
  EXPECT_TRUE(ArenaFolder::Open(scratch.path()).ok());
}

TEST_F(ArenaFileTest, RefusesFoldersThatAreNotItsOwnOrNotInMemory) {
  EXPECT_TRUE(absl::IsInvalidArgument(ArenaFolder::Open("rows").status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(ArenaFolder::Open("/proc").status()) ||
              absl::IsPermissionDenied(ArenaFolder::Open("/proc").status()));
  EXPECT_TRUE(absl::IsNotFound(ArenaFolder::Open(scratch.File("a/b")).status()));
  std::ofstream(scratch.File("file")) << "text";
  EXPECT_FALSE(ArenaFolder::Open(scratch.File("file")).ok());
  ASSERT_EQ(mkdir(scratch.File("open").c_str(), 0700), 0);
  ASSERT_EQ(chmod(scratch.File("open").c_str(), 0777), 0);
  const absl::Status open = ArenaFolder::Open(scratch.File("open")).status();
  EXPECT_TRUE(absl::IsPermissionDenied(open)) << open;
  EXPECT_THAT(Said(open), HasSubstr("make it 0700"));
  // A folder that Open() creates belongs to this user only.
  ASSERT_TRUE(ArenaFolder::Open(scratch.File("new")).ok());
  struct stat info {};
  ASSERT_EQ(stat(scratch.File("new").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(scratch.File("new/lock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

}  // namespace
}  // namespace spillway
