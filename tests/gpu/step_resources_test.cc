#include "gpu/device/step_resources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "host/memory/memory_budget.h"

namespace spillway::cuda {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class StepResourcePoolTest : public ::testing::Test {
 protected:
  MemoryBudget device_budget_{64 * kMiB, 0, "--gpu-memory-limit"};
  MemoryBudget host_budget_{256 * kMiB};
  StepResourcePool pool_{/*ordinal=*/0, /*step_bytes=*/16 * kMiB, &device_budget_, &host_budget_};
};

TEST_F(StepResourcePoolTest, TheNextStepGetsThoseOfTheLast) {
  StepResources first = *pool_.Take(4 * kMiB + 1, kMiB / 2);
  std::byte* const data = first.device.data();
  std::byte* const pinned = first.pinned[1].data();
  cudaStream_t stream = first.capture.get();
  EXPECT_NE(first.pinned[0].data(), pinned);
  pool_.Keep(std::move(first));
  // There is room for a step that is a little larger.
  StepResources next = *pool_.Take(5 * kMiB, kMiB);
  EXPECT_EQ(next.device.data(), data);
  EXPECT_EQ(next.pinned[1].data(), pinned);
  EXPECT_EQ(next.capture.get(), stream);
  // A second step at the same time has its own.
  const StepResources other = *pool_.Take(kMiB, kMiB);
  EXPECT_NE(other.device.data(), data);
}

TEST_F(StepResourcePoolTest, EachStepGetsTheSmallestThatIsLargeEnough) {
  StepResources small = *pool_.Take(4 * kMiB, kMiB / 4);
  // Beyond the memory of a wave there is no room.
  StepResources large = *pool_.Take(20 * kMiB + 256, kMiB / 4);
  std::byte* const of_small = small.device.data();
  std::byte* const of_large = large.device.data();
  pool_.Keep(std::move(large));
  pool_.Keep(std::move(small));
  EXPECT_EQ(device_budget_.used_bytes(), 24 * kMiB + 256);
  EXPECT_EQ(pool_.Take(kMiB, kMiB / 4)->device.data(), of_small);
  EXPECT_EQ(device_budget_.used_bytes(), 20 * kMiB + 256);
  EXPECT_EQ(pool_.Take(5 * kMiB, kMiB / 4)->device.data(), of_large);
  EXPECT_EQ(device_budget_.used_bytes(), 0);
}

TEST_F(StepResourcePoolTest, KeepsThoseOfFourSteps) {
  MemoryBudget host_budget(1024 * kMiB);
  StepResourcePool pool(/*ordinal=*/0, /*step_bytes=*/16 * kMiB, &device_budget_, &host_budget);
  std::vector<StepResources> steps;
  for (const int64_t bytes : {2, 1, 4, 3, 5}) {
    steps.push_back(*pool.Take(bytes * kMiB, kMiB / 4));
  }
  for (StepResources& step : steps) pool.Keep(std::move(step));
  // Without the smallest one.
  EXPECT_EQ(device_budget_.used_bytes(), 14 * kMiB);
}

TEST_F(StepResourcePoolTest, RoomIsNoReasonToFail) {
  const absl::StatusOr<DeviceBuffer> other =
      DeviceBuffer::Create(50 * kMiB + 1024, &device_budget_, "a test");
  ASSERT_EQ(other.status(), absl::OkStatus());
  // 14 MiB with room, of which 1 KiB is not there.
  EXPECT_EQ(pool_.Take(13 * kMiB, kMiB).status(), absl::OkStatus());
}

TEST_F(StepResourcePoolTest, KeepsNoLargePartOfTheHostMemory) {
  StepResources first = *pool_.Take(kMiB, kMiB);
  StepResources second = *pool_.Take(2 * kMiB, 2 * kMiB);
  pool_.Keep(std::move(first));
  EXPECT_EQ(host_budget_.used_bytes(), 9 * kMiB);
  // A 40th of the limit is 6.4 MiB.
  pool_.Keep(std::move(second));
  EXPECT_EQ(host_budget_.used_bytes(), 6 * kMiB);
  EXPECT_EQ(device_budget_.used_bytes(), 2 * kMiB);
  // What is too large by itself takes no other's place.
  pool_.Keep(*pool_.Take(kMiB, 3 * kMiB));
  EXPECT_EQ(host_budget_.used_bytes(), 6 * kMiB);
}

TEST_F(StepResourcePoolTest, NoTwoStepsHaveOneVersion) {
  EXPECT_EQ(pool_.NextVersion(), 1);
  EXPECT_EQ(pool_.NextVersion(), 2);
}

TEST_F(StepResourcePoolTest, GivesThemBackWhereMemoryIsLacking) {
  pool_.Keep(*pool_.Take(40 * kMiB, kMiB));
  {
    const absl::StatusOr<DeviceBuffer> other =
        DeviceBuffer::Create(30 * kMiB, &device_budget_, "a test");
    ASSERT_EQ(other.status(), absl::OkStatus());
    EXPECT_EQ(device_budget_.used_bytes(), 30 * kMiB);
    EXPECT_EQ(host_budget_.used_bytes(), 0);
    // What is lacking is said, and nothing stays behind.
    const absl::Status status = pool_.Take(40 * kMiB, kMiB).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("a step on a stream"));
    EXPECT_EQ(host_budget_.used_bytes(), 0);
  }
  EXPECT_EQ(pool_.Take(40 * kMiB, kMiB).status(), absl::OkStatus());
  EXPECT_EQ(device_budget_.used_bytes(), 0);
}

}  // namespace
}  // namespace spillway::cuda
