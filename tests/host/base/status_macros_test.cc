#include "host/base/status_macros.h"

#include <gtest/gtest.h>

#include <memory>

namespace spillway {
namespace {

absl::StatusOr<std::unique_ptr<int>> Positive(int value) {
  if (value <= 0) return absl::OutOfRangeError("not positive");
  return std::make_unique<int>(value);
}

absl::Status Check(int value) { return Positive(value).status(); }

// Adds two positive numbers, and counts the steps that were reached.
absl::StatusOr<int> Sum(int a, int b, int& steps) {
  ++steps;
  RETURN_IF_ERROR(Check(a));
  ++steps;
  ASSIGN_OR_RETURN(const std::unique_ptr<int> first, Positive(a));
  std::unique_ptr<int> second;
  ASSIGN_OR_RETURN(second, Positive(b));
  ++steps;
  return *first + *second;
}

TEST(StatusMacros, GoOnWhereAllIsWell) {
  int steps = 0;
  const auto sum = Sum(2, 3, steps);
  ASSERT_TRUE(sum.ok());
  EXPECT_EQ(*sum, 5);
  EXPECT_EQ(steps, 3);
}

TEST(StatusMacros, ReturnTheFirstError) {
  int steps = 0;
  EXPECT_EQ(Sum(0, 3, steps).status(), absl::OutOfRangeError("not positive"));
  EXPECT_EQ(steps, 1);
  steps = 0;
  EXPECT_EQ(Sum(2, 0, steps).status(), absl::OutOfRangeError("not positive"));
  EXPECT_EQ(steps, 2);
}

}  // namespace
}  // namespace spillway
