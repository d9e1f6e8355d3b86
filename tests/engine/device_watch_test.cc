#include "engine/device_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using DeviceWatchTest = EngineTest;

TEST_F(DeviceWatchTest, ADeviceThatOnlyFailsIsLostUntilSomethingSucceeds) {
  DeviceWatch watch(device);
  const auto state = [&watch] { return watch.states().front(); };
  EXPECT_EQ(state().name, device.info().name);
  const absl::Status failed = absl::InternalError("a kernel failed");
  watch.Note(device, failed);
  watch.Note(device, failed);
  EXPECT_FALSE(state().lost);
  EXPECT_FALSE(watch.all_lost());
  watch.Note(device, failed);
  EXPECT_TRUE(state().lost);
  EXPECT_TRUE(watch.all_lost());
  EXPECT_EQ(state().error_count, 3);
  watch.Note(device, absl::OkStatus());
  EXPECT_FALSE(state().lost);
  EXPECT_EQ(state().error_count, 3);
}

TEST_F(DeviceWatchTest, AnUnusableDeviceIsToldOnceAndStaysLost) {
  std::vector<DeviceWatch::Loss> losses;
  DeviceWatch watch(device, [&](const DeviceWatch::Loss& loss) { losses.push_back(loss); });
  // The device survives this error.
  watch.Note(device, absl::InternalError("a kernel failed"));
  watch.Check();
  EXPECT_TRUE(losses.empty());
  EXPECT_EQ(watch.states().front().why, "");
  device.SetUsable(absl::InternalError("an illegal address"));
  watch.Note(device, absl::InternalError("a kernel failed"));
  ASSERT_EQ(losses.size(), 1);
  EXPECT_EQ(losses[0].name, device.info().name);
  EXPECT_EQ(losses[0].why, "an illegal address");
  EXPECT_THAT(losses[0].parts, testing::ElementsAre(device.info().name));
  EXPECT_TRUE(watch.states().front().lost);
  EXPECT_EQ(watch.states().front().why, "an illegal address");
  watch.Note(device, absl::InternalError("a kernel failed"));
  watch.Check();
  watch.Note(device, absl::OkStatus());
  EXPECT_EQ(losses.size(), 1);
  EXPECT_TRUE(watch.states().front().lost);
}

TEST_F(DeviceWatchTest, AnIdleDeviceIsFoundToBeLostWhenItIsLookedAt) {
  std::vector<DeviceWatch::Loss> losses;
  DeviceWatch watch(device, [&](const DeviceWatch::Loss& loss) { losses.push_back(loss); });
  device.SetUsable(absl::InternalError("a neighbour's fault"));
  EXPECT_FALSE(watch.states().front().lost);
  watch.Check();
  EXPECT_EQ(losses.size(), 1);
  EXPECT_TRUE(watch.states().front().lost);
}

TEST_F(DeviceWatchTest, RefusalsSayNothingOfTheDevice) {
  DeviceWatch watch(device);
  for (int i = 0; i < 5; ++i) {
    watch.Note(device, absl::ResourceExhaustedError("full"));
    watch.Note(device, absl::CancelledError("the client left"));
  }
  EXPECT_EQ(watch.states().front().error_count, 0);
  EXPECT_FALSE(watch.states().front().lost);
}

TEST_F(DeviceWatchTest, TheEngineTellsItHowAttendsEnd) {
  const auto sequence = NewSequence("a");
  ASSERT_TRUE(Fill(sequence, Rows(0, 4, 2), 0, 4).ok());
  const auto attend = [&](absl::Status failure) {
    if (!failure.ok()) device.FailAttend(std::move(failure));
    AttendRequest request;
    request.items.push_back(Item(sequence));
    std::optional<absl::StatusOr<AttendOutcome>> result;
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
  };
  attend(absl::OkStatus());
  EXPECT_EQ(engine->device_watch().states().front().error_count, 0);
  for (int i = 0; i < 3; ++i) attend(absl::InternalError("a kernel failed"));
  EXPECT_EQ(engine->device_watch().states().front().error_count, 3);
  EXPECT_TRUE(engine->device_watch().states().front().lost);
  attend(absl::OkStatus());
  EXPECT_FALSE(engine->device_watch().states().front().lost);
  const auto counts = engine->counters().attend.counts();
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), 5);
}

TEST(Distribution, ValuesOnABoundAreOfTheRangeThatEndsThere) {
  Distribution<2> values({1, 2});
  for (const double value : {0.5, 1.0, 1.5, 2.0, 7.0}) values.Note(value);
  EXPECT_THAT(values.counts(), testing::ElementsAre(2, 2, 1));
  EXPECT_EQ(values.sum(), 12);
  values.Add({1, 0, 3}, 10);
  EXPECT_THAT(values.counts(), testing::ElementsAre(3, 2, 4));
  EXPECT_EQ(values.sum(), 22);
}

}  // namespace
}  // namespace spillway
