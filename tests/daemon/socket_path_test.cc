#include "daemon/config/socket_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "daemon/server/listeners.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A daemon, as far as its files are concerned.
class Holder {
 public:
  explicit Holder(const std::string& path) : path_(*SocketPath::Claim(path, {})) {
    Listen(path, SOCK_STREAM, call_);
    Listen(path + std::string(kRegionsSuffix), SOCK_SEQPACKET, regions_);
  }

  void Listen(const std::string& path, int type, Descriptor& listener) {
    listener = *ListenAtPath(path, type, {});
    path_.NoteOwn(path);
  }
  SocketPath& path() { return path_; }
  Descriptor& call() { return call_; }

 private:
  SocketPath path_;
  Descriptor call_, regions_;
};

class SocketPathTest : public ::testing::Test {
 protected:
  SocketPathTest() {
    std::string pattern = testing::TempDir() + "/socket_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    socket_ = folder_ / "s";
    regions_ = socket_ + std::string(kRegionsSuffix);
    lock_ = socket_ + ".lock";
  }
  ~SocketPathTest() override { fs::remove_all(folder_); }

  absl::Status Refused() const { return SocketPath::Claim(socket_, {}).status(); }
  bool AnythingIsThere() const { return fs::exists(folder_) && !fs::is_empty(folder_); }

  fs::path folder_;
  std::string socket_, regions_, lock_;
};

TEST_F(SocketPathTest, ALivingDaemonKeepsItsPathWithoutItsLockFile) {
  Holder first(socket_);
  for (const auto& removed : {std::vector<std::string>{}, {lock_}, {lock_, socket_}}) {
    for (const std::string& path : removed) fs::remove(path);
    EXPECT_TRUE(absl::IsAlreadyExists(Refused())) << Refused();
    EXPECT_THAT(std::string(Refused().message()), HasSubstr("another daemon listens on"));
  }
  // The refused ones have left nothing and removed nothing.
  EXPECT_FALSE(fs::exists(lock_));
  EXPECT_THAT(*first.path().FindGone(), ElementsAre(lock_, socket_));
  EXPECT_TRUE(fs::exists(lock_));
}

TEST_F(SocketPathTest, WhatADeadDaemonLeftIsReplaced) {
  for (const auto& [path, type] : {std::pair(socket_, SOCK_STREAM), {regions_, SOCK_SEQPACKET}}) {
    ASSERT_TRUE(ListenAtPath(path, type, {}).ok());  // closed at once
  }
  std::ofstream(lock_) << "";
  { const Holder next(socket_); }
  EXPECT_FALSE(AnythingIsThere());
}

TEST_F(SocketPathTest, FilesThatAreGoneAreFoundAndTheLockIsMadeAgain) {
  std::optional<Holder> daemon(socket_);
  EXPECT_THAT(*daemon->path().FindGone(), IsEmpty());
  fs::remove_all(folder_);
  EXPECT_THAT(*daemon->path().FindGone(), ElementsAre(lock_, socket_, regions_));
  EXPECT_THAT(*daemon->path().FindGone(), ElementsAre(socket_, regions_));
  daemon->Listen(socket_, SOCK_STREAM, daemon->call());
  EXPECT_THAT(*daemon->path().FindGone(), ElementsAre(regions_));
  EXPECT_TRUE(absl::IsAlreadyExists(Refused()));
  daemon.reset();
  EXPECT_FALSE(AnythingIsThere());
}

TEST_F(SocketPathTest, FilesOfAnotherDaemonAreNotTouched) {
  std::optional<Holder> first(socket_);
  for (const std::string& path : {socket_, regions_, lock_}) fs::remove(path);
  Holder second(socket_);
  EXPECT_TRUE(absl::IsAlreadyExists(first->path().FindGone().status()));
  first.reset();
  EXPECT_THAT(*second.path().FindGone(), IsEmpty());
}

TEST_F(SocketPathTest, AnotherFileInTheSocketsPlaceIsAnError) {
  Holder daemon(socket_);
  fs::remove(socket_);
  std::ofstream(socket_) << "mine";
  const absl::Status status = daemon.path().FindGone().status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(socket_ + " is not this daemon's socket any more"));
  fs::remove(socket_);
  EXPECT_THAT(*daemon.path().FindGone(), ElementsAre(socket_));
}

}  // namespace
}  // namespace spillway
