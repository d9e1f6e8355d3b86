#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "bench/gpu/handover/shared_page.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway::bench {
namespace {

using ::testing::HasSubstr;

constexpr auto kLong = std::chrono::seconds(60);

bool Always() { return true; }
bool Never() { return false; }

TEST(Reached, IsCyclic) {
  EXPECT_TRUE(Reached(5, 5));
  EXPECT_TRUE(Reached(6, 5));
  EXPECT_FALSE(Reached(4, 5));
  EXPECT_TRUE(Reached(2, 0xfffffff0));
  for (const uint32_t round : {0u, 1u, 6'000'000u}) EXPECT_TRUE(Reached(kPoison, round));
}

TEST(SharedPage, IsSharedWithAProcessThatHasTheDescriptor) {
  const absl::StatusOr<SharedPage> page = SharedPage::Create();
  ASSERT_TRUE(page.ok());
  EXPECT_EQ((*page)->go.load(), 0u);
  const pid_t other = fork();
  if (other == 0) {
    const absl::StatusOr<SharedPage> same = SharedPage::Open(dup(page->fd()));
    if (same.ok()) (*same)->go.store(7);
    _exit(0);
  }
  EXPECT_TRUE(
      WaitFor(**page, Always, kLong, "the flag", [&] { return (*page)->go.load() == 7; }).ok());
  EXPECT_EQ(waitpid(other, nullptr, 0), other);
}

TEST(SharedPage, RefusesWhatIsNoDescriptor) { EXPECT_FALSE(SharedPage::Open(-1).ok()); }

TEST(SetFailed, KeepsTheFirstReasonWithinItsRoom) {
  const absl::StatusOr<SharedPage> page = SharedPage::Create();
  ASSERT_TRUE(page.ok());
  EXPECT_TRUE(Failure(**page).ok());
  SetFailed(**page, absl::InternalError(std::string(10'000, 'x')));
  SetFailed(**page, absl::InternalError("later"));
  EXPECT_EQ(Failure(**page).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Failure(**page).message(), std::string(511, 'x'));
}

TEST(WaitFor, EndsWithTheOthersFailure) {
  const absl::StatusOr<SharedPage> page = SharedPage::Create();
  ASSERT_TRUE(page.ok());
  SetFailed(**page, absl::InternalError("no memory"));
  // Whether or not the condition holds: what frees a stream makes it hold.
  for (const auto& condition : {Always, Never}) {
    const absl::Status status = WaitFor(**page, Always, kLong, "a flag", condition);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(status.message(), "no memory");
  }
}

TEST(WaitFor, EndsWithTheOtherProcess) {
  const absl::StatusOr<SharedPage> page = SharedPage::Create();
  ASSERT_TRUE(page.ok());
  const absl::Status status = WaitFor(**page, Never, kLong, "the peer's flag", Never);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the other process ended while this one waited for the peer's flag"));
}

TEST(WaitFor, EndsInTime) {
  const absl::StatusOr<SharedPage> page = SharedPage::Create();
  ASSERT_TRUE(page.ok());
  const absl::Status status =
      WaitFor(**page, Always, std::chrono::milliseconds(50), "the peer's flag", Never);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "waited 0.05 s for the peer's flag");
}

}  // namespace
}  // namespace spillway::bench
