#include "host/memory/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "host/memory/topology.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kS = kSlabBytes;

std::unique_ptr<Arena> MakeArena(int64_t slabs, int64_t extent_slabs, MemoryBudget* budget,
                                 Arena::ExtentObserver observer = {}, int64_t ready_slabs = 0) {
  ArenaOptions options;
  options.limit_bytes = slabs * kS;
  options.extent_bytes = extent_slabs * kS;
  options.ready_bytes = ready_slabs * kS;
  auto arena = Arena::Create(options, budget, std::move(observer));
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

TEST(Arena, RefusesSenselessOptions) {
  MemoryBudget budget(64 * kS);
  EXPECT_FALSE(Arena::Create({.limit_bytes = kS - 1}, &budget).ok());
  EXPECT_FALSE(Arena::Create({.limit_bytes = kS, .extent_bytes = 0}, &budget).ok());
  EXPECT_FALSE(Arena::Create({.limit_bytes = kS, .extent_bytes = kS + 1}, &budget).ok());
  const auto far = Arena::Create({.limit_bytes = kS, .numa_node = 4096}, &budget);
  EXPECT_THAT(std::string(far.status().message()), HasSubstr("4096"));
}

TEST(Arena, CommitsByExtentsAndKeepsThemForReuse) {
  MemoryBudget budget(64 * kS);
  {
    auto arena = MakeArena(10, 4, &budget);
    EXPECT_EQ(arena->statistics().committed_bytes, 0);
    EXPECT_EQ(arena->free_bytes(), 10 * kS);
    const auto a = arena->AllocateSlabs(1);
    ASSERT_TRUE(a.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*a) % kS, 0u);
    EXPECT_EQ(arena->statistics().committed_bytes, 4 * kS);
    EXPECT_EQ(arena->statistics().used_bytes, kS);
    EXPECT_EQ(budget.used_bytes(), 4 * kS);
    EXPECT_EQ(arena->free_bytes(), 9 * kS);
    arena->FreeSlabs(*a, 1);
    EXPECT_EQ(arena->statistics().committed_bytes, 4 * kS);
    EXPECT_EQ(arena->statistics().used_bytes, 0);
    EXPECT_EQ(arena->free_bytes(), 10 * kS);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(Arena, MemoryIsWritableAndItsOwn) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(6, 2, &budget);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 6; ++i) {
    const auto s = arena->AllocateSlabs(1);
    ASSERT_TRUE(s.ok()) << s.status();
    std::memset(*s, i + 1, kS);
    slabs.push_back(*s);
  }
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(slabs[i][0], std::byte(i + 1));
    EXPECT_EQ(slabs[i][kS - 1], std::byte(i + 1));
  }
}

TEST(Arena, SaysNeededAndFreeBytesAtItsLimit) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(5, 4, &budget);
  ASSERT_TRUE(arena->AllocateSlabs(3).ok());
  const absl::Status status = arena->AllocateSlabs(3).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(3 * kS)));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(2 * kS)));
  EXPECT_TRUE(arena->AllocateSlabs(2).ok());
  EXPECT_EQ(arena->free_bytes(), 0);
  EXPECT_FALSE(arena->AllocateSlabs(int64_t{1} << 60).ok());
}

TEST(Arena, TheBudgetBindsBeforeTheLimit) {
  MemoryBudget budget(3 * kS + 100);
  auto arena = MakeArena(100, 8, &budget);
  EXPECT_EQ(arena->free_bytes(), 3 * kS);
  EXPECT_FALSE(arena->AllocateSlabs(4).ok());
  EXPECT_EQ(budget.used_bytes(), 0);
  // An extent may be smaller than extent_bytes, to use what the budget leaves.
  ASSERT_TRUE(arena->AllocateSlabs(3).ok());
  EXPECT_EQ(budget.used_bytes(), 3 * kS);
  EXPECT_EQ(arena->free_bytes(), 0);
}

TEST(Arena, AnotherUserOfTheBudgetLessensWhatIsFree) {
  MemoryBudget budget(8 * kS);
  auto arena = MakeArena(8, 2, &budget);
  ASSERT_TRUE(arena->AllocateSlabs(1).ok());
  const auto other = budget.Reserve(4 * kS, "other");
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(arena->free_bytes(), 3 * kS);  // one that is committed, two from the budget
  EXPECT_FALSE(arena->AllocateSlabs(4).ok());
  EXPECT_TRUE(arena->AllocateSlabs(3).ok());
}

TEST(Arena, RunsGrowFromTheFreeEndOfWhatIsCommitted) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(4, 2, &budget);
  ASSERT_TRUE(arena->AllocateSlabs(1).ok());
  // One slab is free at the end. A run of three needs it and two more.
  EXPECT_TRUE(arena->AllocateSlabs(3).ok());
}

TEST(Arena, TellsTheObserverOfEveryExtent) {
  MemoryBudget budget(64 * kS);
  std::map<std::byte*, size_t> live;
  {
    Arena::ExtentObserver observer;
    observer.committed = [&](std::span<std::byte> c) {
      EXPECT_EQ(c[0], std::byte{0});
      live[c.data()] = c.size();
      return absl::OkStatus();
    };
    observer.released = [&](std::span<std::byte> c) {
      EXPECT_EQ(live[c.data()], c.size());
      live.erase(c.data());
    };
    auto arena = MakeArena(5, 2, &budget, observer);
    ASSERT_TRUE(arena->AllocateSlabs(2).ok());
    EXPECT_EQ(live.size(), 1u);
    ASSERT_TRUE(arena->AllocateSlabs(2).ok());
    ASSERT_TRUE(arena->AllocateSlabs(1).ok());
    EXPECT_EQ(live.size(), 3u);
  }
  EXPECT_TRUE(live.empty());
}

TEST(Arena, WhatIsExpectedIsCommittedInLargeExtents) {
  MemoryBudget budget(256 * kS);
  std::vector<int64_t> extents;  // slabs
  auto arena = MakeArena(200, 4, &budget,
                         {.committed =
                              [&](std::span<std::byte> extent) {
                                extents.push_back(static_cast<int64_t>(extent.size()) / kS);
                                return absl::OkStatus();
                              },
                          .released = [](std::span<std::byte>) {}});
  // An ordinary extent is enough, so nothing is committed in advance.
  arena->Expect(4 * kS);
  arena->Expect(-1);
  EXPECT_THAT(extents, ElementsAre());
  // In extents of at most 64 MiB.
  arena->Expect(134 * kS - 1);
  EXPECT_THAT(extents, ElementsAre(32, 32, 32, 32, 6));
  EXPECT_EQ(arena->spare_bytes(), 134 * kS);
  arena->Expect(134 * kS);
  EXPECT_EQ(extents.size(), 5u);
  // Slabs in use do not count.
  ASSERT_TRUE(arena->AllocateSlabs(120).ok());
  arena->Expect(24 * kS);
  EXPECT_EQ(extents.back(), 10);
  // Beyond the limit: as much as the limit allows.
  arena->Expect(int64_t{1} << 50);
  EXPECT_EQ(arena->statistics().committed_bytes, 200 * kS);
}

TEST(Arena, CommitsNothingOfWhatIsExpectedWithoutBudget) {
  // Less than a slab of budget is left, and a free slab lies before the uncommitted ones.
  MemoryBudget budget(2 * kS + kS / 2);
  auto arena = MakeArena(16, 1, &budget);
  const auto a = arena->AllocateSlabs(1);
  const auto b = arena->AllocateSlabs(1);
  ASSERT_TRUE(a.ok() && b.ok());
  arena->FreeSlabs(*b, 1);
  arena->Expect(8 * kS);
  EXPECT_EQ(arena->statistics().committed_bytes, 2 * kS);
  EXPECT_EQ(arena->statistics().used_bytes, kS);
  EXPECT_TRUE(arena->AllocateSlabs(1).ok());
}

TEST(Arena, TellsHowFarAnExtentReaches) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(16, 4, &budget);
  std::byte* const first = *arena->AllocateSlabs(3);
  std::byte* const across = *arena->AllocateSlabs(2);
  EXPECT_EQ(arena->BytesToExtentEnd(first), 4 * kS);
  EXPECT_EQ(arena->BytesToExtentEnd(first + kS + 1), 3 * kS - 1);
  ASSERT_EQ(across, first + 3 * kS);
  EXPECT_EQ(arena->BytesToExtentEnd(across + kS - 1), 1);
  EXPECT_EQ(arena->BytesToExtentEnd(across + kS), 4 * kS);
}

TEST(Arena, OfWhatIsExpectedOnlyWhatTheObserverRefusesIsGivenBack) {
  MemoryBudget budget(256 * kS);
  std::vector<std::span<std::byte>> live;
  auto arena = MakeArena(200, 4, &budget,
                         {.committed =
                              [&](std::span<std::byte> extent) {
                                if (live.size() == 2) return absl::InternalError("cannot pin");
                                live.push_back(extent);
                                return absl::OkStatus();
                              },
                          .released = [](std::span<std::byte>) {}});
  arena->Expect(134 * kS);
  ASSERT_EQ(live.size(), 2u);
  EXPECT_EQ(live[1].data(), live[0].data() + live[0].size());
  EXPECT_EQ(budget.used_bytes(), 64 * kS);
  EXPECT_EQ(arena->statistics().committed_bytes, 64 * kS);
  // What was committed can be used; more is refused as before.
  ASSERT_TRUE(arena->AllocateSlabs(64).ok());
  EXPECT_EQ(arena->AllocateSlabs(1).status().code(), absl::StatusCode::kInternal);
  live.pop_back();
  const auto slab = arena->AllocateSlabs(1);
  ASSERT_TRUE(slab.ok()) << slab.status();
  std::memset(*slab, 1, kS);
}

TEST(Arena, AExtentThatTheObserverRefusesIsGivenBack) {
  MemoryBudget budget(64 * kS);
  bool refuse = true;
  Arena::ExtentObserver observer;
  observer.committed = [&](std::span<std::byte>) {
    return refuse ? absl::InternalError("cannot pin") : absl::OkStatus();
  };
  auto arena = MakeArena(4, 2, &budget, observer);
  EXPECT_EQ(arena->AllocateSlabs(1).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(budget.used_bytes(), 0);
  EXPECT_EQ(arena->statistics().committed_bytes, 0);
  refuse = false;
  const auto slab = arena->AllocateSlabs(1);
  ASSERT_TRUE(slab.ok()) << slab.status();
  std::memset(*slab, 1, kS);
}

TEST(Arena, GivesBackAnEighthOfWhatStayedFree) {
  MemoryBudget budget(64 * kS);
  std::vector<std::byte*> released;
  Arena::ExtentObserver observer;
  observer.released = [&](std::span<std::byte> c) { released.push_back(c.data()); };
  auto arena = MakeArena(32, 2, &budget, observer);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 32; ++i) slabs.push_back(*arena->AllocateSlabs(1));
  for (std::byte* slab : slabs) arena->FreeSlabs(slab, 1);
  // In the first call, all slabs count as used since the last call.
  arena->GiveBackIdle();
  EXPECT_EQ(arena->statistics().committed_bytes, 32 * kS);
  // 32 slabs stayed free: 4 are given back, then 28 / 8 rounded up to extents of 2, ...
  for (const int64_t left : {28, 24, 20, 16, 14, 12, 10, 8, 6, 4, 2, 0, 0}) {
    arena->GiveBackIdle();
    EXPECT_EQ(arena->statistics().committed_bytes, left * kS);
    EXPECT_EQ(budget.used_bytes(), left * kS);
    EXPECT_EQ(arena->spare_bytes(), left * kS);
    EXPECT_EQ(arena->free_bytes(), 32 * kS);
  }
  EXPECT_EQ(released.size(), 16u);
}

TEST(Arena, CommitsWhatIsToBeReadyAndKeepsIt) {
  MemoryBudget budget(256 * kS);
  auto arena = MakeArena(128, 4, &budget, {}, 80);
  // 64 MiB are 32 slabs.
  for (const int64_t committed : {32, 64, 80}) {
    EXPECT_EQ(*arena->CommitReady(), committed < 80);
    EXPECT_EQ(arena->statistics().committed_bytes, committed * kS);
  }
  EXPECT_FALSE(*arena->CommitReady());
  EXPECT_EQ(arena->statistics().committed_bytes, 80 * kS);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 120; ++i) slabs.push_back(*arena->AllocateSlabs(1));
  EXPECT_EQ(arena->statistics().committed_bytes, 120 * kS);
  for (std::byte* slab : slabs) arena->FreeSlabs(slab, 1);
  for (int i = 0; i < 40; ++i) arena->GiveBackIdle();
  EXPECT_EQ(arena->statistics().committed_bytes, 80 * kS);
  EXPECT_EQ(arena->free_bytes(), 128 * kS);
}

TEST(Arena, IsReadyAsFarAsThereIsMemory) {
  MemoryBudget budget(24 * kS);
  auto arena = MakeArena(16, 4, &budget, {}, 1000);
  EXPECT_FALSE(*arena->CommitReady());
  EXPECT_EQ(arena->statistics().committed_bytes, 16 * kS);
  // Other users of the budget get it.
  auto other = budget.Reserve(20 * kS, "another use");
  EXPECT_TRUE(other.ok());
  EXPECT_TRUE(*arena->CommitReady());
  EXPECT_EQ(arena->statistics().committed_bytes, 4 * kS);
  EXPECT_TRUE(absl::IsResourceExhausted(arena->CommitReady().status()));
}

TEST(Arena, KeepsAnExtentThatIsPartlyToBeReady) {
  MemoryBudget budget(256 * kS);
  auto arena = MakeArena(128, 32, &budget, {}, 40);
  auto slabs = arena->AllocateSlabs(96);
  ASSERT_TRUE(slabs.ok());
  arena->FreeSlabs(*slabs, 96);
  for (int i = 0; i < 40; ++i) arena->GiveBackIdle();
  EXPECT_EQ(arena->statistics().committed_bytes, 64 * kS);
}

TEST(Arena, KeepsExtentsThatHoldSomethingAndThatWereTakenMeanwhile) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(16, 2, &budget);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 16; ++i) slabs.push_back(*arena->AllocateSlabs(1));
  // One slab of every extent stays in use.
  for (int i = 0; i < 16; i += 2) arena->FreeSlabs(slabs[i], 1);
  for (int i = 0; i < 40; ++i) arena->GiveBackIdle();
  EXPECT_EQ(arena->statistics().committed_bytes, 16 * kS);
  for (int i = 1; i < 16; i += 2) arena->FreeSlabs(slabs[i], 1);
  arena->GiveBackIdle();
  // All slabs are taken and freed between two calls, again and again.
  for (int i = 0; i < 40; ++i) {
    const auto all = arena->AllocateSlabs(16);
    ASSERT_TRUE(all.ok());
    arena->FreeSlabs(*all, 16);
    arena->GiveBackIdle();
  }
  EXPECT_EQ(arena->statistics().committed_bytes, 16 * kS);
}

TEST(Arena, TheBudgetsOtherUsersGetWhatIsFree) {
  MemoryBudget budget(16 * kS);
  auto arena = MakeArena(16, 4, &budget);
  const auto kept = arena->AllocateSlabs(1);
  const auto gone = arena->AllocateSlabs(15);
  ASSERT_TRUE(kept.ok() && gone.ok());
  EXPECT_FALSE(budget.Reserve(1, "other").ok());
  arena->FreeSlabs(*gone, 15);
  // Free extents of 4 slabs are given up, but not more of them than needed.
  const auto other = budget.Reserve(5 * kS, "other");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_LE(arena->statistics().committed_bytes, 11 * kS);
  EXPECT_EQ(arena->free_bytes(), 10 * kS);
  std::memset(*kept, 1, kS);
  EXPECT_FALSE(budget.Reserve(11 * kS, "more").ok());
  EXPECT_TRUE(arena->AllocateSlabs(10).ok());
}

TEST(Arena, WhatWasGivenBackIsCommittedAnewInItsPlace) {
  MemoryBudget budget(12 * kS);
  auto arena = MakeArena(12, 2, &budget);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 12; ++i) {
    slabs.push_back(*arena->AllocateSlabs(1));
    std::memset(slabs.back(), i + 1, kS);
  }
  // Extents [2, 4) and [6, 8), and half of [8, 10), become free.
  for (const int i : {2, 3, 6, 7, 8}) arena->FreeSlabs(slabs[i], 1);
  for (int i = 0; i < 20; ++i) arena->GiveBackIdle();
  EXPECT_EQ(arena->statistics().committed_bytes, 8 * kS);
  EXPECT_EQ(arena->free_bytes(), 5 * kS);
  // A run of three: the gap of two, and the free slab after it.
  const auto run = arena->AllocateSlabs(3);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(*run, slabs[6]);
  std::memset(*run, 100, 3 * kS);
  const auto two = arena->AllocateSlabs(2);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(*two, slabs[2]);
  EXPECT_EQ((*two)[0], std::byte{0}) << "memory that was given back is fresh";
  for (const int i : {0, 1, 4, 5, 9, 10, 11}) EXPECT_EQ(slabs[i][kS / 2], std::byte(i + 1)) << i;
  EXPECT_FALSE(arena->AllocateSlabs(1).ok());
}

TEST(Arena, FreeSlabsApartPayForARunElsewhere) {
  // Address space for 12 slabs, of which the budget pays for 8.
  MemoryBudget budget(8 * kS);
  auto arena = MakeArena(12, 2, &budget);
  std::vector<std::byte*> slabs;
  for (int i = 0; i < 8; ++i) slabs.push_back(*arena->AllocateSlabs(1));
  for (const int i : {0, 1, 4, 5}) arena->FreeSlabs(slabs[i], 1);
  const auto run = arena->AllocateSlabs(4);
  ASSERT_TRUE(run.ok()) << run.status();
  std::memset(*run, 1, 4 * kS);
  EXPECT_EQ(budget.used_bytes(), 8 * kS);
  EXPECT_FALSE(arena->AllocateSlabs(1).ok());
}

TEST(Arena, TakersAndReclaimersDoNotHinderEachOther) {
  constexpr int kSlabs = 16;
  MemoryBudget budget(kSlabs * kS);
  auto arena = MakeArena(kSlabs, 2, &budget);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (int i = 0; i < 200; ++i) {
        const int64_t count = 1 + rng() % 2;
        const auto slab = arena->AllocateSlabs(count);
        if (!slab.ok()) continue;
        (*slab)[0] = std::byte{1};
        arena->FreeSlabs(*slab, count);
        if (budget.used_bytes() > kSlabs * kS) ADD_FAILURE() << budget.used_bytes();
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 200; ++i) {
      (void)budget.Reserve((1 + i % 8) * kS, "other");
      arena->GiveBackIdle();
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used_bytes(), arena->statistics().committed_bytes);
}

TEST(Arena, RandomUseNeverOverlapsAndReturnsToItsStart) {
  constexpr int kSlabs = 24;
  MemoryBudget budget(kSlabs * kS);
  auto arena = MakeArena(kSlabs, 5, &budget);
  std::mt19937 rng(3);
  std::map<std::byte*, int64_t> held;
  int64_t held_slabs = 0;
  for (int step = 0; step < 4000; ++step) {
    if (rng() % 2 == 0 || held.empty()) {
      const int64_t count = 1 + rng() % 3;
      const auto base = arena->AllocateSlabs(count);
      if (!base.ok()) {
        // The only reason may be that no run is long enough.
        EXPECT_TRUE(held_slabs + count > kSlabs || count > 1) << base.status();
        continue;
      }
      const auto next = held.upper_bound(*base);
      if (next != held.end()) {
        ASSERT_LE(*base + count * kS, next->first);
      }
      if (next != held.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second * kS, *base);
      }
      held[*base] = count;
      held_slabs += count;
    } else {
      const auto it = std::next(held.begin(), rng() % held.size());
      arena->FreeSlabs(it->first, it->second);
      held_slabs -= it->second;
      held.erase(it);
    }
    if (step % 50 == 0) arena->GiveBackIdle();
    ASSERT_EQ(budget.used_bytes(), held_slabs * kS + arena->spare_bytes());
    ASSERT_EQ(arena->free_bytes(), (kSlabs - held_slabs) * kS);
  }
  for (const auto& [base, count] : held) arena->FreeSlabs(base, count);
  EXPECT_EQ(arena->statistics().used_bytes, 0);
  EXPECT_TRUE(arena->AllocateSlabs(kSlabs).ok()) << "free runs were not joined";
}

TEST(Arena, BindsToANode) {
  alignas(4096) static std::byte page[4096];
  if (absl::Status bound = BindMemory(page, 0); !bound.ok()) {
    GTEST_SKIP() << "this system refuses to bind memory: " << bound;
  }
  MemoryBudget budget(64 * kS);
  auto arena =
      Arena::Create({.limit_bytes = 4 * kS, .extent_bytes = 2 * kS, .numa_node = 0}, &budget);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const auto slab = (*arena)->AllocateSlabs(3);
  ASSERT_TRUE(slab.ok()) << slab.status();
  std::memset(*slab, 1, 3 * kS);
}

TEST(Arena, ReportsHugePagesWithinWhatIsCommitted) {
  MemoryBudget budget(64 * kS);
  auto arena = MakeArena(8, 4, &budget);
  ASSERT_TRUE(arena->AllocateSlabs(1).ok());
  const ArenaStatistics s = arena->statistics();
  EXPECT_EQ(s.limit_bytes, 8 * kS);
  EXPECT_GE(s.huge_page_bytes, 0);
  EXPECT_LE(s.huge_page_bytes, s.committed_bytes);
  EXPECT_EQ(s.huge_page_bytes % kS, 0);
}

}  // namespace
}  // namespace spillway
