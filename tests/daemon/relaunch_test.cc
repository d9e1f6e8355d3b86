#include "daemon/server/relaunch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace spillway {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

SteadyTime At(int64_t second) { return SteadyTime(std::chrono::seconds(second)); }

TEST(Relaunch, ADaemonThatSomebodyElseStartedKnowsOfNoLoss) {
  for (const char* text : {"", "nonsense", "{}", "[1]", R"({"losses": "x"})", R"({"losses": 3})"}) {
    const Relaunch relaunch = Relaunch::FromText(text);
    EXPECT_EQ(relaunch.loss_count(), 0) << text;
    EXPECT_EQ(relaunch.attempt_count(), 0) << text;
    EXPECT_EQ(relaunch.reason(), "") << text;
    EXPECT_THAT(relaunch.devices(), ElementsAre()) << text;
  }
}

TEST(Relaunch, WhatItKnowsPassesThroughText) {
  Relaunch relaunch;
  const std::string reason = "cuda:0: \"illegal\" \xff address";  // not UTF-8
  ASSERT_TRUE(relaunch.NoteLoss(reason, {"cuda:0", "cuda:1"}, At(100)).ok());
  relaunch.NoteAttempt();
  relaunch.NoteAttempt();
  const Relaunch next = Relaunch::FromText(relaunch.ToText());
  EXPECT_EQ(next.loss_count(), 1);
  EXPECT_THAT(next.reason(), HasSubstr("\"illegal\""));
  EXPECT_THAT(next.devices(), ElementsAre("cuda:0", "cuda:1"));
  EXPECT_EQ(next.attempt_count(), 2);
}

TEST(Relaunch, LossesThatFollowOneAnotherQuicklyAreNotTriedForEver) {
  Relaunch relaunch;
  const auto lose = [&](int64_t second) {
    // Each loss is in a new process.
    relaunch = Relaunch::FromText(relaunch.ToText());
    return relaunch.NoteLoss("cuda:0: gone", {"cuda:0"}, At(second));
  };
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(lose(1000 + i).ok()) << i;
  const absl::Status refused = lose(1010);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("6 times within 10m"));
  EXPECT_EQ(relaunch.loss_count(), 5);
  // The first loss is 10 minutes ago and no longer counts.
  EXPECT_TRUE(lose(1600).ok());
  EXPECT_EQ(relaunch.loss_count(), 6);
  EXPECT_FALSE(lose(1600).ok());
  // Since a start of the machine, or written by an earlier version in seconds since 1970.
  EXPECT_TRUE(lose(5).ok());
}

TEST(Relaunch, ALossBeginsToCountAttemptsAnew) {
  Relaunch relaunch;
  relaunch.NoteAttempt();
  ASSERT_TRUE(relaunch.NoteLoss("cuda:0: gone", {"cuda:0"}, At(0)).ok());
  EXPECT_EQ(relaunch.attempt_count(), 0);
}

}  // namespace
}  // namespace spillway
