#include "host/core/tail_draw.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace spillway {
namespace {

constexpr uint64_t kAll = uint64_t{1} << 32;

// Two strata of 1,000 and 2,000 tokens, with 48 rows wanted from each.
TailDraw TwoStrata(int64_t rows_left) {
  TailDraw draw{};
  draw.strata = 2;
  draw.rows_left = rows_left;
  for (int h = 0; h < 2; ++h) {
    draw.token_count[h] = 1000 * (h + 1);
    draw.wanted[h] = 48;
    draw.threshold[h] = SampleThreshold(48, draw.token_count[h]);
  }
  return draw;
}

DrawVerdict Pilot(TailDraw& draw, std::vector<int64_t> counts) {
  return JudgePilot(counts.data(), draw);
}
DrawVerdict Sample(TailDraw& draw, std::vector<int64_t> counts) {
  return JudgeSample(counts.data(), draw);
}

TEST(JudgePilot, TakesWhatIsEnoughAndFits) {
  TailDraw draw = TwoStrata(100);
  EXPECT_EQ(Pilot(draw, {50, 50}), DrawVerdict::kTake);
  EXPECT_EQ(Pilot(draw, {8, 8}), DrawVerdict::kTake);
  EXPECT_FALSE(draw.limited);
}

TEST(JudgePilot, WidensStrataOfFewerThanEightRows) {
  TailDraw draw = TwoStrata(1000);
  const uint64_t first = draw.threshold[0], second = draw.threshold[1];
  EXPECT_EQ(Pilot(draw, {7, 50}), DrawVerdict::kDrawAgain);
  EXPECT_EQ(draw.threshold[0], 2 * first);
  EXPECT_EQ(draw.threshold[1], second);
  EXPECT_FALSE(draw.limited);
  // At most to all tokens. A threshold of 0 also grows.
  draw.threshold[0] = kAll - 1;
  draw.threshold[1] = 0;
  EXPECT_EQ(Pilot(draw, {7, 0}), DrawVerdict::kDrawAgain);
  EXPECT_EQ(draw.threshold[0], kAll);
  EXPECT_EQ(draw.threshold[1], 2u);
}

TEST(JudgePilot, AStratumOfFewerTokensIsEnoughWhenAllAreDrawn) {
  TailDraw draw = TwoStrata(1000);
  draw.token_count[0] = 5;
  EXPECT_EQ(Pilot(draw, {5, 50}), DrawVerdict::kTake);
  EXPECT_EQ(Pilot(draw, {4, 50}), DrawVerdict::kDrawAgain);
}

TEST(JudgePilot, ADrawAboveTheLimitIsMadeThreeQuartersAsLarge) {
  TailDraw draw = TwoStrata(99);
  EXPECT_EQ(Pilot(draw, {50, 50}), DrawVerdict::kDrawAgain);
  EXPECT_TRUE(draw.limited);
  EXPECT_EQ(draw.wanted[0], 36);
  EXPECT_EQ(draw.threshold[0], SampleThreshold(36, 1000));
  EXPECT_EQ(draw.threshold[1], SampleThreshold(36, 2000));
}

TEST(JudgePilot, GivesUpBeforeAPilotOfOne) {
  TailDraw draw = TwoStrata(10);
  int rounds = 0;
  while (Pilot(draw, {50, 50}) == DrawVerdict::kDrawAgain) ASSERT_LT(++rounds, 20);
  // Rows per stratum: 48, 36, 27, 20, 15, 11, 8, 6, 4, 3, 2, 1.
  EXPECT_EQ(rounds, 11);
  EXPECT_TRUE(draw.given_up);
  EXPECT_TRUE(draw.limited);
  EXPECT_EQ(draw.threshold[0], 0u);
  EXPECT_EQ(draw.threshold[1], 0u);
}

TEST(JudgePilot, TakesNothingWhereNothingIsLeft) {
  TailDraw draw = TwoStrata(0);
  EXPECT_EQ(Pilot(draw, {0, 0}), DrawVerdict::kTake);
  TailDraw none{};
  none.rows_left = 100;
  EXPECT_EQ(Pilot(none, {}), DrawVerdict::kTake);
}

// The pilot drew 50 rows from each stratum, and the budgets ask for 160 from each.
TailDraw AfterThePilot(int64_t rows_left) {
  TailDraw draw = TwoStrata(rows_left);
  for (int h = 0; h < 2; ++h) {
    draw.drawn[h] = 50;
    draw.drawn_threshold[h] = draw.threshold[h];
    draw.wanted[h] = 160;
    draw.threshold[h] = BudgetThreshold(draw, h);
  }
  return draw;
}

TEST(BudgetThreshold, WhatIsDrawnStaysDrawn) {
  TailDraw draw = AfterThePilot(1000);
  EXPECT_EQ(draw.threshold[0], SampleThreshold(160, 1000));
  draw.wanted[0] = 20;
  EXPECT_EQ(BudgetThreshold(draw, 0), SampleThreshold(48, 1000));
}

TEST(JudgeSample, TakesWhatFits) {
  TailDraw draw = AfterThePilot(320);
  EXPECT_EQ(Sample(draw, {110, 110}), DrawVerdict::kTake);
  EXPECT_FALSE(draw.limited);
}

TEST(JudgeSample, ADrawAboveTheLimitIsMadeASixteenthSmaller) {
  TailDraw draw = AfterThePilot(319);
  EXPECT_EQ(Sample(draw, {110, 110}), DrawVerdict::kDrawAgain);
  EXPECT_TRUE(draw.limited);
  EXPECT_EQ(draw.wanted[0], 150);
  EXPECT_EQ(draw.threshold[0], SampleThreshold(150, 1000));
}

TEST(JudgeSample, KeepsThePilotWhereNoMoreFits) {
  TailDraw draw = AfterThePilot(100);
  int rounds = 0;
  while (Sample(draw, {10, 10}) == DrawVerdict::kDrawAgain) {
    ASSERT_LT(++rounds, 50);
    if (draw.threshold[0] == draw.drawn_threshold[0]) break;
  }
  EXPECT_EQ(draw.wanted[0], 50);
  EXPECT_EQ(draw.threshold[0], draw.drawn_threshold[0]);
  EXPECT_EQ(draw.threshold[1], draw.drawn_threshold[1]);
  EXPECT_EQ(Sample(draw, {0, 0}), DrawVerdict::kTake);
}

}  // namespace
}  // namespace spillway
