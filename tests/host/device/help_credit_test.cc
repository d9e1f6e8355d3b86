#include "host/device/help_credit.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

using std::chrono::milliseconds;

TEST(HelpCreditTest, AtMostHalfOfTheTimeIsGiven) {
  HelpCredit credit;
  HelpCredit::Time now = std::chrono::steady_clock::now();
  EXPECT_TRUE(credit.MayHelp(now));
  now += HelpCredit::kMax;  // credit is saved up
  EXPECT_TRUE(credit.MayHelp(now));
  now += HelpCredit::kMax;  // credit is spent
  credit.Spent(now);
  EXPECT_TRUE(credit.MayHelp(now));
  // From here on there is a boundary every millisecond, at which the thread helps for 3 ms if it
  // may.
  milliseconds own{0}, given{0};
  for (int i = 0; i < 600; ++i) {
    if (credit.MayHelp(now)) {
      now += milliseconds(3);
      credit.Spent(now);
      given += milliseconds(3);
    }
    now += milliseconds(1);
    own += milliseconds(1);
  }
  EXPECT_EQ(own, milliseconds(600));
  EXPECT_EQ(given, milliseconds(600));
}

TEST(HelpCreditTest, WhatIsSavedUpHasALimit) {
  HelpCredit credit;
  HelpCredit::Time now = std::chrono::steady_clock::now() + std::chrono::hours(1);
  EXPECT_TRUE(credit.MayHelp(now));
  now += HelpCredit::kMax + milliseconds(5);
  credit.Spent(now);
  EXPECT_FALSE(credit.MayHelp(now));
  now += milliseconds(4);
  EXPECT_FALSE(credit.MayHelp(now));
  now += milliseconds(1);
  EXPECT_TRUE(credit.MayHelp(now));
}

}  // namespace
}  // namespace spillway
