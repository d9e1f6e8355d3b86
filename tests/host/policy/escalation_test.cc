#include "host/policy/escalation.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

// Whether an attend at level b asks for at least as much as one at level a.
bool NotWeaker(const Escalation& a, const Escalation& b) {
  if (b.dense) return true;
  if (b.tail.bound == Bound::kPaper && b.tail.tail == Tail::kUniform) return !a.dense;
  return !a.dense && b.tail.inflation >= a.tail.inflation &&
         b.tail.pilot_token_count >= a.tail.pilot_token_count;
}

TEST(Escalation, ClimbsFromThePolicyToDenseAttention) {
  Policy uniform;
  uniform.tail = Tail::kUniform;
  Policy paper = uniform;
  paper.bound = Bound::kPaper;
  // As if only the tail of such a policy was overridden: the bound stays, but is not used.
  Policy stratified = paper;
  stratified.tail = Tail::kStratified;
  Policy strong;
  strong.inflation = 16;
  strong.pilot_token_count = 4096;
  for (const Policy& policy : {Policy(), uniform, paper, stratified, strong}) {
    const int last = DenseLevel(policy);
    ASSERT_GT(last, 0);
    EXPECT_EQ(EscalationAt(policy, 0).tail.inflation, policy.inflation);
    EXPECT_EQ(EscalationAt(policy, 0).tail.pilot_token_count, policy.pilot_token_count);
    for (int level = 0; level < last; ++level) {
      EXPECT_FALSE(EscalationAt(policy, level).dense) << level;
      EXPECT_TRUE(NotWeaker(EscalationAt(policy, level), EscalationAt(policy, level + 1))) << level;
    }
    EXPECT_TRUE(EscalationAt(policy, last).dense);
    EXPECT_TRUE(EscalationAt(policy, last + 5).dense);
  }
}

TEST(Escalation, TakesTheStepsInTheirOrder) {
  const Policy policy;  // inflation 1.25, pilot 24
  EXPECT_DOUBLE_EQ(EscalationAt(policy, 1).tail.inflation, 1.25 * 1.25);
  EXPECT_EQ(EscalationAt(policy, 1).tail.pilot_token_count, 24);
  EXPECT_DOUBLE_EQ(EscalationAt(policy, 6).tail.inflation, 4);
  EXPECT_EQ(EscalationAt(policy, 7).tail.pilot_token_count, 48);
  EXPECT_EQ(EscalationAt(policy, 10).tail.pilot_token_count, 384);
  EXPECT_EQ(EscalationAt(policy, 11).tail.pilot_token_count, 512);
  EXPECT_DOUBLE_EQ(EscalationAt(policy, 11).tail.inflation, 4);
  const Escalation paper = EscalationAt(policy, 12);
  EXPECT_EQ(paper.tail.tail, Tail::kUniform);
  EXPECT_EQ(paper.tail.bound, Bound::kPaper);
  EXPECT_EQ(paper.tail.inflation, policy.inflation);
  EXPECT_EQ(DenseLevel(policy), 13);
  Policy unused = policy;
  unused.bound = Bound::kPaper;
  EXPECT_EQ(DenseLevel(unused), 13);
}

TEST(Escalation, LeavesAPolicyThatPromisesNothing) {
  Policy none;
  none.tail = Tail::kNone;
  Policy denominator;
  denominator.tail = Tail::kUniform;
  denominator.bound = Bound::kDenominator;
  for (const Policy& policy : {none, denominator}) {
    EXPECT_EQ(DenseLevel(policy), 0);
    EXPECT_FALSE(EscalationAt(policy, 7).dense);
    EXPECT_EQ(EscalationAt(policy, 7).tail.inflation, policy.inflation);
    EXPECT_EQ(EscalationAt(policy, 7).tail.tail, policy.tail);
  }
}

}  // namespace
}  // namespace spillway
