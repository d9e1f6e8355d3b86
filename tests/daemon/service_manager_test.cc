#include "daemon/server/service_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "host/base/descriptor.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;

// The side of the service manager: a datagram socket that an environment variable names.
class ServiceManagerTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef SPILLWAY_SYSTEMD
    GTEST_SKIP() << "built without libsystemd";
#endif
    std::string folder = std::filesystem::temp_directory_path() / "notify-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    const std::string path = folder_ / "socket";
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path.c_str(), 1);
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  // The assignments in the oldest message; empty if there is none.
  std::vector<std::string> Receive() const {
    char text[4096];
    const ssize_t size = recv(socket_.get(), text, sizeof(text), MSG_DONTWAIT);
    if (size < 0) return {};
    return absl::StrSplit(std::string(text, static_cast<size_t>(size)), '\n', absl::SkipEmpty());
  }

 private:
  std::filesystem::path folder_;
  const Descriptor socket_{socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

TEST_F(ServiceManagerTest, TellsHowTheDaemonFares) {
  const ServiceManager manager;
  EXPECT_TRUE(manager.listens());
  manager.Ready("Serving");
  EXPECT_THAT(Receive(), ElementsAre("READY=1", "STATUS=Serving"));
  manager.Beat();
  EXPECT_THAT(Receive(), ElementsAre("WATCHDOG=1"));
  manager.Stopping("Draining", absl::Seconds(2.5));
  EXPECT_THAT(Receive(),
              ElementsAre("STOPPING=1", "STATUS=Draining", "EXTEND_TIMEOUT_USEC=2500000"));
  EXPECT_THAT(Receive(), ElementsAre());
}

TEST_F(ServiceManagerTest, AReloadSaysWhenItBegan) {
  const ServiceManager manager;
  const auto now_us = [] {
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
  };
  const int64_t before_us = now_us();
  manager.Reloading();
  const int64_t after_us = now_us();
  const std::vector<std::string> said = Receive();
  ASSERT_EQ(said.size(), 2);
  EXPECT_EQ(said[0], "RELOADING=1");
  const std::vector<std::string> parts = absl::StrSplit(said[1], '=');
  ASSERT_EQ(parts[0], "MONOTONIC_USEC");
  int64_t said_us = 0;
  ASSERT_TRUE(absl::SimpleAtoi(parts[1], &said_us));
  EXPECT_GE(said_us, before_us);
  EXPECT_LE(said_us, after_us);
}

TEST_F(ServiceManagerTest, AStatusIsOneLineAndSetsNothingElse) {
  ServiceManager().Ready("two\nSTOPPING=1");
  EXPECT_THAT(Receive(), ElementsAre("READY=1", "STATUS=two STOPPING=1"));
}

TEST_F(ServiceManagerTest, BeatsAreForTheProcessThatTheyAreAskedOf) {
  EXPECT_EQ(ServiceManager().beat_interval_max(), absl::InfiniteDuration());
  setenv("WATCHDOG_USEC", "30000000", 1);
  EXPECT_EQ(ServiceManager().beat_interval_max(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getpid()).c_str(), 1);
  EXPECT_EQ(ServiceManager().beat_interval_max(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getppid()).c_str(), 1);
  EXPECT_EQ(ServiceManager().beat_interval_max(), absl::InfiniteDuration());
}

TEST_F(ServiceManagerTest, WithoutASocketNothingIsSaid) {
  unsetenv("NOTIFY_SOCKET");
  setenv("WATCHDOG_USEC", "30000000", 1);
  const ServiceManager manager;
  EXPECT_FALSE(manager.listens());
  EXPECT_EQ(manager.beat_interval_max(), absl::InfiniteDuration());
  manager.Ready("Serving");
  EXPECT_THAT(Receive(), ElementsAre());
}

}  // namespace
}  // namespace spillway
