#include "gpu/device/step_resources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>

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

TEST_F(StepResourcePoolTest, LargerMemoryReplacesThem) {
  pool_.Keep(*pool_.Take(4 * kMiB, kMiB));
  EXPECT_EQ(device_budget_.used_bytes(), 4 * kMiB);
  // Beyond the memory of a wave there is no room.
  const StepResources larger = *pool_.Take(20 * kMiB + 256, kMiB);
  EXPECT_EQ(device_budget_.used_bytes(), 20 * kMiB + 256);
  EXPECT_EQ(host_budget_.used_bytes(), 2 * kMiB);
}

TEST_F(StepResourcePoolTest, RoomIsNoReasonToFail) {
  const absl::StatusOr<DeviceBuffer> other =
      DeviceBuffer::Create(50 * kMiB + 1024, &device_budget_, "a test");
  ASSERT_EQ(other.status(), absl::OkStatus());
  // 14 MiB with room, of which 1 KiB is not there.
  EXPECT_EQ(pool_.Take(13 * kMiB, kMiB).status(), absl::OkStatus());
}

TEST_F(StepResourcePoolTest, KeepsNoLargePartOfTheHostMemory) {
  pool_.Keep(*pool_.Take(kMiB, 2 * kMiB));
  EXPECT_EQ(host_budget_.used_bytes(), 4 * kMiB);
  pool_.Keep(*pool_.Take(kMiB, 3 * kMiB));
  EXPECT_EQ(host_budget_.used_bytes(), 0);
  EXPECT_EQ(device_budget_.used_bytes(), 0);
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
