#include "host/device/short_jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace spillway {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ShortJobsTest : public ::testing::Test {
 protected:
  void Push(int64_t owner, int64_t work, const std::string& name) {
    jobs_.Push({owner, work, [this, name] { served_.push_back(name); }});
  }

  // Pauses until this many jobs were served: a thread gives at most half of its time.
  void PauseUntilServed(int64_t work, size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (served_.size() < count && std::chrono::steady_clock::now() < deadline) {
      jobs_.Pause(work);
    }
    ASSERT_GE(served_.size(), count);
  }

  ShortJobs jobs_;
  std::vector<std::string> served_;
};

TEST_F(ShortJobsTest, FreeWorkersTakeOneOwnersInTheirOrderWhateverTheirSize) {
  Push(1, 100, "giant");
  Push(1, 1, "step");
  Push(1, 10, "another");
  for (int i = 0; i < 4; ++i) jobs_.RunNext();  // the last call finds nothing
  EXPECT_THAT(served_, ElementsAre("giant", "step", "another"));
}

TEST_F(ShortJobsTest, OwnersTakeTurns) {
  for (const char* name : {"a0", "a1", "a2"}) Push(1, 1, name);
  for (const char* name : {"b0", "b1"}) Push(2, 1, name);
  for (int i = 0; i < 5; ++i) jobs_.RunNext();
  EXPECT_THAT(served_, ElementsAre("a0", "b0", "a1", "b1", "a2"));
}

TEST_F(ShortJobsTest, APauseServesWhatIsAtMostAQuarterInTurns) {
  Push(1, 26, "long");
  Push(1, 25, "a0");
  Push(1, 3, "a1");
  Push(2, 20, "b0");
  PauseUntilServed(100, 3);
  jobs_.Pause(100);
  EXPECT_THAT(served_, ElementsAre("a0", "b0", "a1"));
  jobs_.RunNext();
  EXPECT_THAT(served_, ElementsAre("a0", "b0", "a1", "long"));
}

TEST_F(ShortJobsTest, OneOfSeveralOfASizeLeavesTheOthersToThePauses) {
  for (const char* name : {"a0", "a1", "a2"}) Push(1, 5, name);
  jobs_.RunNext();
  ASSERT_NO_FATAL_FAILURE(PauseUntilServed(100, 3));
  // A loop of the same size that has ended takes no job along either.
  Push(1, 5, "a3");
  jobs_.Loop(5, 4, [](int64_t) {});
  ASSERT_NO_FATAL_FAILURE(PauseUntilServed(100, 4));
  EXPECT_THAT(served_, ElementsAre("a0", "a1", "a2", "a3"));
}

TEST_F(ShortJobsTest, WhatRunsInAPauseIsNotInterrupted) {
  std::vector<bool> paused;
  jobs_.Push({1, 20, [&] {
                paused.push_back(ShortJobs::Paused());
                Push(1, 1, "step");
                jobs_.Pause(20);
                EXPECT_THAT(served_, IsEmpty());
              }});
  paused.push_back(ShortJobs::Paused());
  PauseUntilServed(100, 1);
  paused.push_back(ShortJobs::Paused());
  EXPECT_THAT(paused, ElementsAre(false, true, false));
  EXPECT_THAT(served_, ElementsAre("step"));
}

TEST_F(ShortJobsTest, ACallersThreadBeginsNoJobThatWaits) {
  Push(1, 1, "step");
  {
    const ShortJobs::CallersThread callers;
    jobs_.Pause(100);
    EXPECT_THAT(served_, IsEmpty());
  }
  PauseUntilServed(100, 1);
  EXPECT_THAT(served_, ElementsAre("step"));
}

TEST_F(ShortJobsTest, AThreadInsideALongJobTakesIterationsOfAShortOnesLoop) {
  constexpr int kCount = 50;
  std::vector<std::atomic<int>> times(kCount);
  std::atomic<int> done = 0, by_owner = 0;
  std::atomic<bool> over = false;
  std::thread owner([&] {
    const std::thread::id self = std::this_thread::get_id();
    // This thread is the only worker.
    tbb::task_arena arena(1);
    arena.execute([&] {
      jobs_.Loop(10, kCount, [&](int64_t i) {
        ++times[i];
        if (std::this_thread::get_id() == self) {
          // The owner's first iteration lasts until all others are done.
          if (++by_owner == 1) {
            while (done < kCount - 1) std::this_thread::yield();
          }
        } else {
          EXPECT_TRUE(ShortJobs::Paused());
        }
        ++done;
      });
    });
    over = true;
  });
  while (by_owner == 0) std::this_thread::yield();
  // A job that is less than four times as long does not take part.
  jobs_.Pause(39);
  EXPECT_EQ(done, 0);
  const ShortJobs::CallersThread callers;  // a caller's thread takes part nevertheless
  while (!over) jobs_.Pause(40);
  owner.join();
  EXPECT_EQ(by_owner, 1);
  std::vector<int> counts(times.begin(), times.end());
  EXPECT_THAT(counts, Each(1));
}

TEST_F(ShortJobsTest, ALoopEndsAfterTheIterationsThatOthersTook) {
  std::atomic<bool> taken = false, ended = false;
  std::atomic<int> begun = 0;
  std::thread owner([&] {
    const std::thread::id self = std::this_thread::get_id();
    tbb::task_arena arena(1);
    arena.execute([&] {
      jobs_.Loop(1, 2, [&](int64_t) {
        ++begun;
        if (std::this_thread::get_id() == self) {
          while (begun < 2) std::this_thread::yield();
        } else {
          while (begun < 2) std::this_thread::yield();
          // The owner has nothing left to do, but must not return yet.
          for (int i = 0; i < 1000; ++i) std::this_thread::yield();
          EXPECT_FALSE(ended);
          taken = true;
        }
      });
    });
    ended = true;
    EXPECT_TRUE(taken);
  });
  while (!ended) jobs_.Pause(100);
  owner.join();
}

}  // namespace
}  // namespace spillway
