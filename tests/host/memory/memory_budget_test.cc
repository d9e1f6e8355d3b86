#include "host/memory/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <limits>
#include <thread>
#include <vector>

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(MemoryBudget, ChargesUntilTheReservationGoes) {
  MemoryBudget budget(100);
  {
    absl::StatusOr<MemoryReservation> a = budget.Reserve(60, "a");
    ASSERT_TRUE(a.ok());
    EXPECT_EQ(budget.used_bytes(), 60);
    EXPECT_EQ(budget.free_bytes(), 40);
    MemoryReservation moved = *std::move(a);
    EXPECT_EQ(moved.bytes(), 60);
    EXPECT_EQ(budget.used_bytes(), 60);
    moved.Release();
    EXPECT_EQ(budget.used_bytes(), 0);
    EXPECT_TRUE(budget.Reserve(100, "all").ok());
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudget, RefusesWithNeededAndFreeBytes) {
  MemoryBudget budget(100);
  const auto held = budget.Reserve(70, "held");
  ASSERT_TRUE(held.ok());
  const absl::Status status = budget.Reserve(31, "a workspace").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a workspace"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("31"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("30"));
  const auto payload =
      status.GetPayload(absl::string_view(kNeededFreePayload.data(), kNeededFreePayload.size()));
  ASSERT_TRUE(payload.has_value());
  EXPECT_EQ(std::string(*payload), "31 30");
  EXPECT_EQ(budget.used_bytes(), 70);
  EXPECT_TRUE(budget.Reserve(30, "the rest").ok());
}

TEST(MemoryBudget, RefusalsNameTheLimitAndItsSetting) {
  MemoryBudget budget(100, 30, "--memory-limit");
  EXPECT_EQ(std::string(budget.Reserve(71, "a table", MemoryUse::kTables).status().message()),
            "a table needs 71 bytes of memory and 70 bytes are free of the limit of 100 bytes, "
            "which --memory-limit sets");
  const absl::Status status = budget.Reserve(31, "a request", MemoryUse::kMessages).status();
  EXPECT_EQ(std::string(status.message()),
            "a request needs 31 bytes of memory and 30 bytes are free of the 30 that messages "
            "have of the limit of 100 bytes, which --memory-limit sets");
  const auto limit =
      status.GetPayload(absl::string_view(kMemoryLimitPayload.data(), kMemoryLimitPayload.size()));
  ASSERT_TRUE(limit.has_value());
  EXPECT_EQ(std::string(*limit), "100 --memory-limit");
}

TEST(MemoryBudget, AHugeRequestDoesNotOverflow) {
  MemoryBudget budget(100);
  const auto held = budget.Reserve(100, "held");
  EXPECT_FALSE(budget.Reserve(std::numeric_limits<int64_t>::max(), "huge").ok());
  EXPECT_EQ(budget.used_bytes(), 100);
}

TEST(MemoryBudget, MessagesHaveAShareOfTheirOwn) {
  MemoryBudget budget(100, 30);
  EXPECT_EQ(budget.free_bytes(), 70);
  const auto pages = budget.Reserve(70, "pages", MemoryUse::kPages);
  ASSERT_TRUE(pages.ok());
  EXPECT_FALSE(budget.Reserve(1, "a table", MemoryUse::kTables).ok());
  {
    const auto message = budget.Reserve(30, "a message", MemoryUse::kMessages);
    ASSERT_TRUE(message.ok()) << "what is full of pages leaves messages their share";
    EXPECT_EQ(budget.used_bytes(), 100);
    EXPECT_EQ(budget.used_bytes(MemoryUse::kMessages), 30);
    EXPECT_EQ(budget.used_bytes(MemoryUse::kPages), 70);
    const absl::Status status = budget.Reserve(7, "b", MemoryUse::kMessages).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("7 bytes of memory and 0 bytes are free"));
  }
  EXPECT_EQ(budget.used_bytes(), 70);
}

TEST(MemoryBudget, MessagesDoNotGoBeyondTheirShare) {
  MemoryBudget budget(100, 30);
  EXPECT_FALSE(budget.Reserve(31, "a message", MemoryUse::kMessages).ok());
  const auto message = budget.Reserve(30, "a message", MemoryUse::kMessages);
  ASSERT_TRUE(message.ok());
  EXPECT_TRUE(budget.Reserve(70, "pages", MemoryUse::kPages).ok());
}

TEST(MemoryBudget, TheMessagesShareIsAnEighthWithinBounds) {
  constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;
  EXPECT_EQ(MemoryBudget::MessageShare(100), 50);
  EXPECT_EQ(MemoryBudget::MessageShare(64 * kMiB), 16 * kMiB);
  EXPECT_EQ(MemoryBudget::MessageShare(4 * kGiB), 512 * kMiB);
  EXPECT_EQ(MemoryBudget::MessageShare(1024 * kGiB), kGiB);
}

TEST(MemoryBudget, AsksForWhatIsMissingBeforeItRefuses) {
  MemoryBudget budget(100, 20);
  auto held = budget.Reserve(60, "pages", MemoryUse::kPages);
  ASSERT_TRUE(held.ok());
  std::vector<int64_t> asked;
  const auto reclaim = budget.AddReclaim([&](int64_t bytes) {
    asked.push_back(bytes);
    *held = MemoryReservation();
  });
  EXPECT_FALSE(budget.Reserve(21, "pages", MemoryUse::kPages).ok());
  EXPECT_FALSE(budget.Reserve(21, "a message", MemoryUse::kMessages).ok());
  EXPECT_FALSE(budget.Reserve(81, "more than there is", MemoryUse::kTables).ok());
  EXPECT_THAT(asked, IsEmpty());
  EXPECT_TRUE(budget.Reserve(20, "what fits", MemoryUse::kTables).ok());
  EXPECT_THAT(asked, IsEmpty());
  EXPECT_TRUE(budget.Reserve(33, "a table", MemoryUse::kTables).ok());
  EXPECT_THAT(asked, ElementsAre(13));
  budget.RemoveReclaim(reclaim);
}

TEST(MemoryBudget, IsNeverPassedByManyThreads) {
  // Four threads hold up to 13 reservations of 32 bytes on average.
  constexpr int64_t kLimit = 1000;
  MemoryBudget budget(kLimit);
  std::atomic<bool> passed{false};
  std::atomic<int> refused{0};
  std::barrier together(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<MemoryReservation> held;
      for (int i = 0; i < 5000; ++i) {
        // All threads hold the most here, so some requests are refused in any order.
        if (i % 1000 == 12) together.arrive_and_wait();
        absl::StatusOr<MemoryReservation> r = budget.Reserve(8 + (i * 7 + t) % 50, "x");
        if (r.ok()) {
          held.push_back(*std::move(r));
        } else {
          ++refused;
        }
        if (budget.used_bytes() > kLimit) passed = true;
        if (i % 13 == 12) held.clear();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_FALSE(passed);
  EXPECT_GT(refused, 0);
  EXPECT_EQ(budget.used_bytes(), 0);
}

}  // namespace
}  // namespace spillway
