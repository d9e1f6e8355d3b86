#include "host/base/task_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

namespace spillway {
namespace {

TEST(TaskThreadTest, RunsOneTaskAfterTheOther) {
  TaskThread thread;
  thread.Wait();  // for nothing
  int sum = 0;
  for (int i = 1; i <= 1000; ++i) {
    thread.Start([&sum, i] { sum += i; });
    thread.Wait();
    ASSERT_EQ(sum, i * (i + 1) / 2);
    thread.Wait();
    ASSERT_EQ(sum, i * (i + 1) / 2);
  }
}

TEST(TaskThreadTest, RunsBesideTheCaller) {
  TaskThread thread;
  std::promise<std::thread::id> began;
  std::promise<void> may_end;
  std::future<std::thread::id> id = began.get_future();
  bool ended = false;
  thread.Start([&] {
    began.set_value(std::this_thread::get_id());
    may_end.get_future().wait();
    ended = true;
  });
  EXPECT_NE(id.get(), std::this_thread::get_id());
  may_end.set_value();
  thread.Wait();
  EXPECT_TRUE(ended);
}

TEST(TaskThreadTest, WhatIsCancelledHasEndedOrNeverRuns) {
  int count = 0;
  for (int i = 0; i < 1000; ++i) {
    const int before = count;
    TaskThread thread;
    thread.Start([&count] { ++count; });
    thread.Cancel();
    const int after = count;
    EXPECT_GE(after, before);
    thread.Start([&count] { count += 10; });
    thread.Wait();
    EXPECT_EQ(count, after + 10);
  }
}

TEST(TaskThreadTest, GoesWhenItsTaskHasEnded) {
  bool ended = false;
  {
    std::promise<void> began;
    TaskThread thread;
    thread.Start([&] {
      began.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended = true;
    });
    began.get_future().wait();
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace spillway
