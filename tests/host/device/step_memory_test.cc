#include "host/device/step_memory.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace spillway {
namespace {

TEST(StepMemoryTest, TheSmallestThatIsLargeEnough) {
  const std::vector<StepMemory> kept = {{400, 10}, {100, 10}, {200, 10}, {200, 50}};
  EXPECT_EQ(FindStepMemory(kept, {1, 1}), 1);
  EXPECT_EQ(FindStepMemory(kept, {100, 10}), 1);
  EXPECT_EQ(FindStepMemory(kept, {101, 10}), 2);
  EXPECT_EQ(FindStepMemory(kept, {100, 11}), 3);
  EXPECT_EQ(FindStepMemory(kept, {201, 1}), 0);
}

TEST(StepMemoryTest, NoneIsLargeEnough) {
  const std::vector<StepMemory> kept = {{400, 10}, {100, 50}};
  EXPECT_EQ(FindStepMemory(kept, {401, 1}), std::nullopt);
  EXPECT_EQ(FindStepMemory(kept, {101, 11}), std::nullopt);
  EXPECT_EQ(FindStepMemory({}, {0, 0}), std::nullopt);
}

}  // namespace
}  // namespace spillway
