#include "daemon/server/region_server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/server/listeners.h"
#include "host/base/descriptor.h"

namespace spillway {
namespace {

// A region server on its own socket path, with few sessions.
class RegionServerTest : public ::testing::Test {
 protected:
  // A connection, and the id of its session; empty if the server closed it at once.
  struct Client {
    Descriptor connection;
    std::string session;
  };

  RegionServerTest() {
    std::string folder = std::filesystem::temp_directory_path() / "regions-XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = folder_ / "socket";
  }
  ~RegionServerTest() override {
    server.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start(const RegionServer::Limits& limits) {
    server = *RegionServer::Start(*ListenAtPath(path_, SOCK_SEQPACKET, SocketAccess()), limits,
                                  &regions);
  }

  Client Connect() const {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    Client client{Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)), ""};
    const timeval limit = {60, 0};
    setsockopt(client.connection.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    std::array<char, 256> id;
    if (connect(client.connection.get(), reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) != 0) {
      return client;
    }
    const ssize_t size = recv(client.connection.get(), id.data(), id.size(), 0);
    if (size > 0) client.session.assign(id.data(), static_cast<size_t>(size));
    return client;
  }
  std::vector<Client> ConnectTimes(int count) const {
    std::vector<Client> clients;
    for (int i = 0; i < count; ++i) clients.push_back(Connect());
    return clients;
  }

  // Whether the server has ended the session. Waits until it does if `waits`.
  static bool HasEnded(const Client& client, bool waits) {
    char byte;
    return recv(client.connection.get(), &byte, 1, waits ? 0 : MSG_DONTWAIT) == 0;
  }

  absl::Status Attach(const Client& client) {
    return regions.Attach(caller, client.session, 1).status();
  }

  // Forks a process that opens `count` sessions and holds them until it is killed.
  pid_t HoldInAnotherProcess(int count) const {
    std::array<int, 2> pipe_ends;
    EXPECT_EQ(pipe(pipe_ends.data()), 0);
    const pid_t child = fork();
    if (child == 0) {
      const std::vector<Client> held = ConnectTimes(count);
      (void)!write(pipe_ends[1], "x", 1);
      for (;;) pause();
    }
    char byte;
    EXPECT_EQ(read(pipe_ends[0], &byte, 1), 1);
    for (const int end : pipe_ends) close(end);
    return child;
  }
  static void Kill(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }

  MemoryBudget budget{int64_t{64} << 20};
  AccountTable accounts;
  RegionTable regions{RegionTable::Kind::kSessions, &budget, &accounts};
  const Caller caller;
  std::unique_ptr<RegionServer> server;

 private:
  std::filesystem::path folder_;
  std::string path_;
};

// Long enough that no session ends in a test because of its age.
constexpr std::chrono::minutes kLong{10};

TEST_F(RegionServerTest, ASessionThatNoCallNamesEnds) {
  Start({.unused_max = std::chrono::milliseconds(300)});
  const Client silent = Connect();
  const Client used = Connect();
  ASSERT_TRUE(Attach(used).ok());
  EXPECT_TRUE(HasEnded(silent, true));
  EXPECT_TRUE(absl::IsNotFound(Attach(silent)));
  EXPECT_FALSE(HasEnded(used, false));
  EXPECT_TRUE(Attach(used).ok());
}

TEST_F(RegionServerTest, AtTheLimitAnUnusedSessionMakesRoom) {
  Start({.unused_max = kLong, .session_count_max = 4, .peer_session_count_max = 4});
  const std::vector<Client> first = ConnectTimes(4);
  ASSERT_TRUE(Attach(first[0]).ok());
  // The oldest that nobody uses.
  const Client fifth = Connect();
  EXPECT_FALSE(fifth.session.empty());
  EXPECT_TRUE(HasEnded(first[1], true));
  // If all are used, the new one is closed, and none of the others.
  for (const Client* client : {&first[2], &first[3], &fifth}) ASSERT_TRUE(Attach(*client).ok());
  EXPECT_EQ(Connect().session, "");
  for (const Client* client : {&first[0], &first[2], &first[3], &fifth}) {
    EXPECT_FALSE(HasEnded(*client, false));
  }
  // A session that a call has named lately is used, even without regions.
  const std::string region = (*regions.List(caller, fifth.session)).front()->id;
  ASSERT_TRUE(regions.Detach(caller, fifth.session, region).ok());
  EXPECT_EQ(Connect().session, "");
}

TEST_F(RegionServerTest, OneProcessKeepsNoOtherOut) {
  Start({.unused_max = kLong, .session_count_max = 8, .peer_session_count_max = 6});
  const Client own = Connect();
  const pid_t other = HoldInAnotherProcess(20);
  // The other process has lost sessions of its own only, although this one is older and unused.
  EXPECT_FALSE(HasEnded(own, false));
  const std::vector<Client> more = ConnectTimes(3);
  EXPECT_FALSE(HasEnded(own, false));
  for (const Client& client : more) EXPECT_TRUE(Attach(client).ok());
  Kill(other);
}

TEST_F(RegionServerTest, OneProcessHasAtMostItsShare) {
  Start({.unused_max = kLong, .session_count_max = 8, .peer_session_count_max = 3});
  const std::vector<Client> own = ConnectTimes(3);
  for (const Client& client : own) ASSERT_TRUE(Attach(client).ok());
  EXPECT_EQ(Connect().session, "");
  // A process that ends leaves its sessions to others.
  Kill(HoldInAnotherProcess(3));
  EXPECT_TRUE(Attach(own[0]).ok());
}

TEST_F(RegionServerTest, ManySessionsAreBounded) {
  Start({.unused_max = kLong, .session_count_max = 16, .peer_session_count_max = 16});
  const std::vector<Client> many = ConnectTimes(200);
  int open = 0;
  for (const Client& client : many) open += HasEnded(client, false) ? 0 : 1;
  EXPECT_EQ(open, 16);
}

}  // namespace
}  // namespace spillway
