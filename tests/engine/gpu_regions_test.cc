// Regions in a device's memory, on a toy device whose memory the host can read.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/regions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/shared_toy.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class GpuRegionsTest : public EngineTest {
 protected:
  SharedToy gpu{"cuda:0", "GPU-a"};
  const Caller caller;
  RegionTable regions{RegionTable::Kind::kSessions, &budget, &engine->accounts(), &gpu};
  std::string session = regions.OpenSession();
};

TEST_F(GpuRegionsTest, AreOfTheDeviceThatIsNamed) {
  const int64_t before = budget.used_bytes();
  for (const char* name : {"cuda:0", "GPU-a"}) {
    const auto region = regions.AttachGpu(caller, session, 1, name);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ((*region)->bytes.size(), SharedDeviceMemory::kGranule);
    EXPECT_EQ((*region)->gpu(), &gpu);
    EXPECT_TRUE((*region)->on_gpu);
    EXPECT_EQ(*regions.Find(caller, (*region)->id), *region);
  }
  // The regions are charged to the device only.
  EXPECT_EQ(budget.used_bytes(), before);
  EXPECT_EQ(gpu.shared_count(), 2);
  EXPECT_THAT(*regions.List(caller, session), SizeIs(2));
}

TEST_F(GpuRegionsTest, ADeviceThatIsNotThereIsNamed) {
  for (const auto& [name, told] :
       {std::pair("cuda:1",
                  "value cuda:1 is not a device of the engine, which has: cuda:0 (GPU-a)"),
        std::pair("GPU-b", "value GPU-b is not a device")}) {
    const absl::Status status = regions.AttachGpu(caller, session, 1, name).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("device"));
    EXPECT_THAT(status.message(), HasSubstr(told));
  }
  RegionTable of_toy(RegionTable::Kind::kSessions, &budget, &engine->accounts(), &device);
  EXPECT_THAT(of_toy.AttachGpu(caller, of_toy.OpenSession(), 1, "toy:0").status().message(),
              HasSubstr("toy:0 has no memory of its own"));
  EXPECT_THAT(*regions.List(caller, session), SizeIs(0));
}

TEST_F(GpuRegionsTest, AreRefusedAsOthersAre) {
  EXPECT_TRUE(absl::IsInvalidArgument(regions.AttachGpu(caller, session, 0, "cuda:0").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(regions.AttachGpu(caller, session, -1, "cuda:0").status()));
  EXPECT_TRUE(absl::IsNotFound(regions.AttachGpu(caller, "none", 1, "cuda:0").status()));
  RegionTable none(RegionTable::Kind::kNone, &budget, &engine->accounts(), &gpu);
  EXPECT_TRUE(absl::IsUnimplemented(none.AttachGpu(caller, session, 1, "cuda:0").status()));
  for (int64_t i = 0; i < RegionTable::kRegionCountMax; ++i) {
    ASSERT_TRUE(regions.AttachGpu(caller, session, 1, "cuda:0").ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(regions.AttachGpu(caller, session, 1, "cuda:0").status()));
  EXPECT_TRUE(absl::IsResourceExhausted(regions.Attach(caller, session, 1).status()));
  EXPECT_EQ(gpu.shared_count(), RegionTable::kRegionCountMax);
}

TEST_F(GpuRegionsTest, GoWithWhatUsesThemLast) {
  const std::shared_ptr<Region> first = *regions.AttachGpu(caller, session, 1, "cuda:0");
  std::shared_ptr<Region> second = *regions.AttachGpu(caller, session, 1, "cuda:0");
  const std::string id = second->id;
  ASSERT_TRUE(regions.Detach(caller, session, id).ok());
  EXPECT_TRUE(absl::IsNotFound(regions.Find(caller, id).status()));
  EXPECT_EQ(gpu.shared_count(), 2);  // a request still uses it
  second.reset();
  EXPECT_EQ(gpu.shared_count(), 1);
  regions.CloseSession(session);
  EXPECT_TRUE(absl::IsNotFound(regions.Find(caller, first->id).status()));
  EXPECT_EQ(gpu.shared_count(), 1);
}

TEST_F(GpuRegionsTest, OfAnotherDeviceAppendNothing) {
  const std::shared_ptr<Region> region = *regions.AttachGpu(caller, session, 1, "cuda:0");
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 4);
  Chunk chunk = ChunkOf(rows, 0, 4);
  chunk.on_gpu = chunk.shared_source = true;
  chunk.gpu = region->gpu();
  std::optional<absl::StatusOr<AppendOutcome>> result;
  engine->Append({sequence, chunk, nullptr}, Into(&result));
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(absl::IsInvalidArgument(result->status())) << result->status();
  EXPECT_THAT(result->status().message(),
              HasSubstr("chunk.k: is in the memory of cuda:0, but sequences/s is on toy:0"));
  EXPECT_EQ(device.waiting_count(), 0);
  EXPECT_EQ(sequence->token_count(), 0);
  // A chunk in the memory of the sequence's own device is appended.
  chunk.gpu = &device;
  result.reset();
  engine->Append({sequence, chunk, nullptr}, Into(&result));
  device.ReleaseAll();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->ok()) << result->status();
}

}  // namespace
}  // namespace spillway
