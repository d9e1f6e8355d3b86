// For builds with every method.
#include "gtest/gtest.h"
#include "host/policy/methods.h"
#include "spillway/v1/policy.pb.h"

namespace spillway {
namespace {

TEST(Methods, HaveARowForEveryValueOfTheApi) {
  EXPECT_EQ(static_cast<int>(SelectorMethods().size()), v1::Selector_ARRAYSIZE - 1);
  EXPECT_EQ(static_cast<int>(TailMethods().size()), v1::Tail_ARRAYSIZE - 1);
}

}  // namespace
}  // namespace spillway
