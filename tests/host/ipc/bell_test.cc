#include "host/ipc/bell.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <thread>

#include "gtest/gtest.h"

namespace spillway {
namespace {

using std::chrono::microseconds;
using Clock = BellWaiter::Clock;

constexpr auto kLong = std::chrono::seconds(60);

TEST(BellWaiterTest, FindsWhatHasChangedBefore) {
  Bell bell = {};
  BellWaiter waiter;
  bell.Ring(7);
  EXPECT_TRUE(waiter.Await(bell, 6, Clock::now()));
  EXPECT_FALSE(waiter.Await(bell, 7, Clock::now()));
}

TEST(BellWaiterTest, EndsAtTheDeadline) {
  Bell bell = {};
  BellWaiter waiter;
  const auto deadline = Clock::now() + std::chrono::milliseconds(20);
  while (Clock::now() < deadline) EXPECT_FALSE(waiter.Await(bell, 0, deadline));
  EXPECT_EQ(bell.asleep.load(), 0u);
}

TEST(BellWaiterTest, SpinsAsLongAsWaitsHaveTakenAndStopsWhereTheyAreLong) {
  BellWaiter waiter;
  EXPECT_EQ(waiter.spin(), microseconds(50));
  waiter.Learn(microseconds(10));
  EXPECT_EQ(waiter.spin(), microseconds(20));
  waiter.Learn(microseconds(40));
  EXPECT_EQ(waiter.spin(), microseconds(50));
  for (const int expected : {25000, 12500, 6250, 0, 0}) {
    waiter.Learn(microseconds(51));
    EXPECT_EQ(waiter.spin(), std::chrono::nanoseconds(expected));
  }
  // Short waits make the spin longer again, also waits of no time.
  waiter.Learn(microseconds(0));
  EXPECT_EQ(waiter.spin(), std::chrono::nanoseconds(6250));
}

TEST(BellWaiterTest, SpinsLongerWhereItIsAskedTo) {
  BellWaiter waiter;
  waiter.SetSpinMax(microseconds(400));
  EXPECT_EQ(waiter.spin(), microseconds(400));
  waiter.Learn(microseconds(300));
  EXPECT_EQ(waiter.spin(), microseconds(400));
  waiter.Learn(microseconds(401));
  EXPECT_EQ(waiter.spin(), microseconds(200));
  waiter.Learn(microseconds(30));
  EXPECT_EQ(waiter.spin(), microseconds(60));
  waiter.SetSpinMax(BellWaiter::kSpinMax);
  EXPECT_EQ(waiter.spin(), microseconds(50));
}

TEST(BellTest, WakesWhoSleepsAsOftenAsItRings) {
  Bell there = {}, back = {};
  constexpr uint32_t kCount = 5000;
  std::thread answering([&] {
    BellWaiter waiter;
    for (uint32_t i = 1; i <= kCount; ++i) {
      while (!waiter.Await(there, i - 1, Clock::now() + kLong)) {
      }
      back.Ring(i);
    }
  });
  BellWaiter waiter;
  for (uint32_t i = 1; i <= kCount; ++i) {
    there.Ring(i);
    ASSERT_TRUE(waiter.Await(back, i - 1, Clock::now() + kLong)) << i;
    ASSERT_EQ(back.number.load(), i);
  }
  answering.join();
}

TEST(BellTest, WakeMakesTheSleeperLook) {
  Bell bell = {};
  std::atomic<bool> stop = false;
  std::thread sleeping([&] {
    BellWaiter waiter;
    while (!stop) {
      EXPECT_FALSE(waiter.Await(bell, 0, Clock::now() + kLong));
    }
  });
  while (bell.asleep.load() == 0) std::this_thread::yield();
  stop = true;
  // The thread may not sleep yet, so one Wake() may not be enough.
  while (bell.asleep.load() != 0) bell.Wake();
  sleeping.join();
}

TEST(BellTest, WorksBetweenProcesses) {
  constexpr uint32_t kCount = 1000;
  void* const memory =
      mmap(nullptr, 2 * sizeof(Bell), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Bell* const bells = new (memory) Bell[2]();
  const pid_t child = fork();
  if (child == 0) {
    BellWaiter waiter;
    for (uint32_t i = 1; i <= kCount; ++i) {
      if (!waiter.Await(bells[0], i - 1, Clock::now() + kLong)) _exit(1);
      bells[1].Ring(i);
    }
    _exit(0);
  }
  BellWaiter waiter;
  for (uint32_t i = 1; i <= kCount; ++i) {
    bells[0].Ring(i);
    ASSERT_TRUE(waiter.Await(bells[1], i - 1, Clock::now() + kLong)) << i;
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  munmap(memory, 2 * sizeof(Bell));
}

}  // namespace
}  // namespace spillway
