#include "host/policy/effort.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

// Whether an attend with b asks for at least as much as one with a.
bool NotWeaker(const Effort& a, const Effort& b) {
  if (b.dense) return true;
  if (b.policy.bound == Bound::kPaper && b.policy.tail == Tail::kUniform) return !a.dense;
  return !a.dense && b.policy.inflation >= a.policy.inflation &&
         b.policy.pilot_token_count >= a.policy.pilot_token_count;
}

TEST(Effort, ClimbsFromThePolicyToDenseAttention) {
  Policy uniform;
  uniform.tail = Tail::kUniform;
  Policy paper = uniform;
  paper.bound = Bound::kPaper;
  Policy strong;
  strong.inflation = 16;
  strong.pilot_token_count = 4096;
  for (const Policy& policy : {Policy(), uniform, paper, strong}) {
    const int last = DenseLevel(policy);
    ASSERT_GT(last, 0);
    EXPECT_EQ(EffortAt(policy, 0).policy.inflation, policy.inflation);
    EXPECT_EQ(EffortAt(policy, 0).policy.pilot_token_count, policy.pilot_token_count);
    for (int level = 0; level < last; ++level) {
      EXPECT_FALSE(EffortAt(policy, level).dense) << level;
      EXPECT_TRUE(NotWeaker(EffortAt(policy, level), EffortAt(policy, level + 1))) << level;
    }
    EXPECT_TRUE(EffortAt(policy, last).dense);
    EXPECT_TRUE(EffortAt(policy, last + 5).dense);
  }
}

TEST(Effort, TakesTheStepsInTheirOrder) {
  const Policy policy;  // inflation 1.25, pilot 48
  EXPECT_DOUBLE_EQ(EffortAt(policy, 1).policy.inflation, 1.25 * 1.25);
  EXPECT_EQ(EffortAt(policy, 1).policy.pilot_token_count, 48);
  EXPECT_DOUBLE_EQ(EffortAt(policy, 6).policy.inflation, 4);
  EXPECT_EQ(EffortAt(policy, 7).policy.pilot_token_count, 96);
  EXPECT_EQ(EffortAt(policy, 10).policy.pilot_token_count, 512);
  EXPECT_DOUBLE_EQ(EffortAt(policy, 10).policy.inflation, 4);
  const Effort paper = EffortAt(policy, 11);
  EXPECT_EQ(paper.policy.tail, Tail::kUniform);
  EXPECT_EQ(paper.policy.bound, Bound::kPaper);
  EXPECT_EQ(paper.policy.inflation, policy.inflation);
  EXPECT_EQ(DenseLevel(policy), 12);
}

TEST(Effort, LeavesAPolicyThatPromisesNothing) {
  Policy none;
  none.tail = Tail::kNone;
  Policy denominator;
  denominator.tail = Tail::kUniform;
  denominator.bound = Bound::kDenominator;
  for (const Policy& policy : {none, denominator}) {
    EXPECT_EQ(DenseLevel(policy), 0);
    EXPECT_FALSE(EffortAt(policy, 7).dense);
    EXPECT_EQ(EffortAt(policy, 7).policy.inflation, policy.inflation);
    EXPECT_EQ(EffortAt(policy, 7).policy.tail, policy.tail);
  }
}

}  // namespace
}  // namespace spillway
