#include "daemon/server/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace spillway {
namespace {

constexpr absl::Duration kPeriod = absl::Milliseconds(8);

// Waits for a counter that another thread increments.
void Await(const std::atomic<int>& counter, int at_least) {
  while (counter < at_least) absl::SleepFor(absl::Milliseconds(1));
}

TEST(WatchdogTest, BeatsOnceAfterEachCheckThatSucceeds) {
  std::atomic<int> checks = 0;
  std::atomic<int> beats = 0;
  {
    const Watchdog watchdog(
        kPeriod,
        [&] {
          ++checks;
          return absl::OkStatus();
        },
        [&] { ++beats; });
    Await(beats, 3);
  }
  EXPECT_EQ(beats, checks);
}

TEST(WatchdogTest, ChecksThatFailGiveNoBeatAndTheNextThatSucceedsDoes) {
  std::atomic<int> checks = 0;
  std::atomic<int> beats = 0;
  std::atomic<int> failed = 0;
  const Watchdog watchdog(
      kPeriod,
      [&]() -> absl::Status {
        if (++checks <= 2) return absl::OkStatus();
        if (++failed > 5) return absl::OkStatus();
        EXPECT_EQ(beats, 2);
        return absl::UnavailableError("all devices are lost");
      },
      [&] { ++beats; });
  Await(beats, 3);
  EXPECT_EQ(failed, 6);
}

TEST(WatchdogTest, ACheckThatHangsStopsTheBeats) {
  absl::Notification hung;
  absl::Notification release;
  std::atomic<int> beats = 0;
  std::atomic<int> checks = 0;
  const Watchdog watchdog(
      kPeriod,
      [&] {
        if (++checks == 2) {
          hung.Notify();
          release.WaitForNotification();
        }
        return absl::OkStatus();
      },
      [&] { ++beats; });
  hung.WaitForNotification();
  absl::SleepFor(4 * kPeriod);
  EXPECT_EQ(beats, 1);
  release.Notify();
  Await(beats, 2);
}

}  // namespace
}  // namespace spillway
