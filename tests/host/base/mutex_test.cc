#include "host/base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace spillway {
namespace {

using Clock = std::chrono::steady_clock;

TEST(Mutex, OneHolderAtATime) {
  Mutex mutex;
  int64_t count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; ++i) {
        MutexLock lock(mutex);
        ++count;
        lock.Unlock();
        lock.Lock();
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 80'000);
}

TEST(CondVar, WakesWhoWaits) {
  Mutex mutex;
  CondVar changed;
  int turn = 0;
  std::thread other([&] {
    const MutexLock lock(mutex);
    while (turn != 1) changed.Wait(mutex);
    turn = 2;
    changed.NotifyAll();
  });
  {
    const MutexLock lock(mutex);
    turn = 1;
    changed.NotifyOne();
    while (turn != 2) changed.Wait(mutex);
  }
  other.join();
}

TEST(CondVar, EndsAtTheDeadline) {
  Mutex mutex;
  CondVar changed;
  const MutexLock lock(mutex);
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(20);
  while (changed.WaitUntil(mutex, deadline)) {
  }
  EXPECT_GE(Clock::now(), deadline);
}

}  // namespace
}  // namespace spillway
