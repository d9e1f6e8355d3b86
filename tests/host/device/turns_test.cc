#include "host/device/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace spillway {
namespace {

using ::testing::ElementsAre;

void AwaitWaiting(const Turns& turns, int count) {
  while (turns.waiting_count() != count) std::this_thread::yield();
}

TEST(TurnsTest, SoManyHaveOneAtOnce) {
  constexpr int kAtOnce = 2;
  Turns turns(kAtOnce);
  std::atomic<int> inside = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const Turn turn(turns);
        const int now = ++inside;
        int seen = most;
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kAtOnce);
  // All turns are free again.
  turns.Begin();
  turns.Begin();
  EXPECT_EQ(turns.waiting_count(), 0);
}

TEST(TurnsTest, TheyComeInTheOrderOfArrivalAndWhoComesAgainIsLast) {
  Turns turns(1);
  turns.Begin();
  Mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      turns.Begin();
      {
        const MutexLock lock(mutex);
        order.push_back(t);
      }
      turns.End();
    });
    AwaitWaiting(turns, t + 1);
  }
  // This thread ends its turn and wants the next at once.
  turns.End();
  turns.Begin();
  {
    const MutexLock lock(mutex);
    order.push_back(3);
  }
  turns.End();
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3));
}

TEST(TurnsTest, OwnersTakeTurns) {
  Turns turns(1);
  turns.Begin(1);
  Mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (const int owner : {1, 1, 1, 2, 2}) {
    threads.emplace_back([&, owner] {
      turns.Begin(owner);
      {
        const MutexLock lock(mutex);
        order.push_back(owner);
      }
      turns.End();
    });
    AwaitWaiting(turns, static_cast<int>(threads.size()));
  }
  turns.End();
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(order, ElementsAre(2, 1, 2, 1, 1));
}

}  // namespace
}  // namespace spillway
