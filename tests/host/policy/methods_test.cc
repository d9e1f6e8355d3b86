#include "host/policy/methods.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace spillway {
namespace {

TEST(FindMethod, KnowsNoValueBeyondTheLast) {
  EXPECT_EQ(FindMethod(static_cast<Selector>(200)), nullptr);
  EXPECT_EQ(FindMethod(static_cast<Tail>(200)), nullptr);
  EXPECT_EQ(FindMethod(Selector::kOracle)->name, "oracle");
  EXPECT_EQ(FindMethod(Tail::kUniform)->name, "uniform");
}

// The methods of the core are in every build, and no value has two rows.
TEST(Methods, StandInTheEnumsOrder) {
  const auto selectors = SelectorMethods();
  EXPECT_GE(selectors.size(), 3u);
  EXPECT_EQ(
      std::adjacent_find(selectors.begin(), selectors.end(),
                         [](const auto* a, const auto* b) { return a->selector >= b->selector; }),
      selectors.end());
  for (const SelectorMethod* method : selectors) EXPECT_EQ(&MethodOf(method->selector), method);
  const auto tails = TailMethods();
  EXPECT_GE(tails.size(), 3u);
  EXPECT_EQ(std::adjacent_find(tails.begin(), tails.end(),
                               [](const auto* a, const auto* b) { return a->tail >= b->tail; }),
            tails.end());
  for (const TailMethod* method : tails) EXPECT_EQ(&MethodOf(method->tail), method);
}

}  // namespace
}  // namespace spillway
