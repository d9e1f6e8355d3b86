#include "daemon/server/helper_program.h"

#include <sys/types.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kLong = absl::Seconds(60);

HelperProgram Program(std::vector<std::string> arguments, std::string input = "") {
  return {
      .arguments = std::move(arguments), .input = std::move(input), .unset = {}, .timeout = kLong};
}

TEST(RunHelper, GivesInputAndReturnsOutput) {
  const auto result = RunHelper(Program({"cat", "-"}, "one\ntwo\n"));
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->ended);
  EXPECT_EQ(result->exit_status, 0);
  EXPECT_EQ(result->output, "one\ntwo\n");
}

TEST(RunHelper, ReturnsExitStatusAndErrors) {
  const auto result = RunHelper(Program({"cat", "/nonexistent/file"}));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->exit_status, 1);
  EXPECT_THAT(result->output, HasSubstr("/nonexistent/file"));
  EXPECT_EQ(RunHelper(Program({"sh", "-c", "kill -9 $$"}))->exit_status, 128 + SIGKILL);
}

TEST(RunHelper, BoundsOutput) {
  const auto result = RunHelper(Program({"cat"}, std::string(100'000, 'x')));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->exit_status, 0);
  EXPECT_EQ(result->output, std::string(4096, 'x'));
}

TEST(RunHelper, NamesAProgramThatIsNotThere) {
  const absl::Status status = RunHelper(Program({"no-such-program-x"})).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no-such-program-x is not in PATH"));
}

TEST(RunHelper, LeavesVariablesOut) {
  ASSERT_EQ(setenv("SPILLWAY_HELPER_KEPT", "yes", 1), 0);
  ASSERT_EQ(setenv("SPILLWAY_HELPER", "no", 1), 0);
  HelperProgram program = Program({"env"});
  program.unset = {"SPILLWAY_HELPER"};
  const auto result = RunHelper(program);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->output, HasSubstr("SPILLWAY_HELPER_KEPT=yes\n"));
  EXPECT_THAT(result->output, Not(HasSubstr("SPILLWAY_HELPER=")));
}

TEST(RunHelper, BlocksNoSignals) {
  sigset_t signals;
  sigset_t before;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &signals, &before), 0);
  const auto result = RunHelper(Program({"grep", "SigBlk", "/proc/self/status"}));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->output, "SigBlk:\t0000000000000000\n");
}

TEST(RunHelper, IgnoresNoBrokenPipe) {
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  const auto result = RunHelper(Program({"sh", "-c", "kill -PIPE $$; echo ignored"}));
  std::signal(SIGPIPE, before);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->output, "");
  EXPECT_EQ(result->exit_status, 128 + SIGPIPE);
}

TEST(RunHelper, KillsWhatDoesNotEndInTime) {
  HelperProgram program = Program({"sh", "-c", "echo $$; sleep 600"});
  program.timeout = absl::Seconds(1);
  const auto result = RunHelper(program);
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->ended);
  pid_t pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(result->output, &pid));
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST(RunHelper, LetsGoOnWhatMay) {
  HelperProgram program = Program({"sh", "-c", "echo $$; sleep 600"});
  program.timeout = absl::Seconds(1);
  program.may_go_on = true;
  const auto result = RunHelper(program);
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->ended);
  pid_t pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(result->output, &pid));
  EXPECT_EQ(kill(-pid, SIGKILL), 0);
}

// RunHelper does not wait for processes that the program leaves running.
TEST(RunHelper, DoesNotWaitForWhatWasLeftRunning) {
  const auto result = RunHelper(Program({"sh", "-c", "sleep 600 & echo $!"}));
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->ended);
  EXPECT_EQ(result->exit_status, 0);
  pid_t pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(result->output, &pid));
  EXPECT_EQ(kill(pid, SIGKILL), 0);
}

}  // namespace
}  // namespace spillway
