#include "daemon/server/acceptor.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/server/listeners.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"

namespace spillway {
namespace {

// A server with an acceptor of two connections, on its own socket path.
class AcceptorTest : public ::testing::Test {
 protected:
  AcceptorTest() {
    std::string folder = std::filesystem::temp_directory_path() / "acceptor-XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = folder_ / "socket";
    absl::StatusOr<Descriptor> listener = ListenAtPath(path_, SOCK_STREAM, SocketAccess());
    EXPECT_TRUE(listener.ok()) << listener.status();
    std::vector<Descriptor> listeners;
    listeners.push_back(*std::move(listener));
    grpc::ServerBuilder builder;
    // The server must have a service.
    builder.RegisterCallbackGenericService(&service_);
    acceptor.emplace(std::move(listeners), 2, grpc::InsecureServerCredentials(), builder, events_);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
    acceptor->Start();
  }
  ~AcceptorTest() override {
    acceptor.reset();
    server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  // Not valid if the connection is refused.
  Descriptor Connect() const {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval limit = {60, 0};
    setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
        0) {
      return Descriptor();
    }
    return connection;
  }

  // Whether the server greets (HTTP/2 SETTINGS).
  static bool IsServed(const Descriptor& connection) {
    char greeting = 0;
    return recv(connection.get(), &greeting, 1, 0) == 1;
  }

  // Waits for this count: gRPC closes a connection shortly after its client does.
  bool Becomes(int64_t open_connection_count) {
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    while (acceptor->open_connection_count() != open_connection_count) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return true;
  }

  std::optional<Acceptor> acceptor;

 private:
  std::filesystem::path folder_;
  std::string path_;
  EventLog events_;
  grpc::CallbackGenericService service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(AcceptorTest, CountsWhatIsOpenAndWhatWasShed) {
  EXPECT_EQ(acceptor->open_connection_count(), 0);
  Descriptor first = Connect();
  const Descriptor second = Connect();
  ASSERT_TRUE(IsServed(first));
  ASSERT_TRUE(IsServed(second));
  EXPECT_EQ(acceptor->open_connection_count(), 2);
  for (int i = 1; i <= 3; ++i) {
    EXPECT_FALSE(IsServed(Connect()));
    EXPECT_EQ(acceptor->shed_connection_count(), i);
  }
  EXPECT_EQ(acceptor->open_connection_count(), 2);
  first = Descriptor();
  ASSERT_TRUE(Becomes(1));
  EXPECT_TRUE(IsServed(Connect()));
  EXPECT_EQ(acceptor->shed_connection_count(), 3);
}

TEST_F(AcceptorTest, AfterAStopNobodyConnectsAndWhoIsThereStays) {
  const Descriptor before = Connect();
  ASSERT_TRUE(IsServed(before));
  acceptor->Stop();
  EXPECT_FALSE(Connect().valid());
  EXPECT_EQ(acceptor->open_connection_count(), 1);
}

TEST_F(AcceptorTest, SaysThatItIsAtWorkWhileItIs) {
  EXPECT_EQ(acceptor->Check(absl::Minutes(1)), absl::OkStatus());
  // New connections are still served.
  EXPECT_TRUE(IsServed(Connect()));
  EXPECT_EQ(acceptor->Check(absl::Minutes(1)), absl::OkStatus());
  acceptor->Stop();
  EXPECT_EQ(acceptor->Check(absl::Minutes(1)), absl::OkStatus());
}

TEST(AcceptorThreadTest, OneThatGivesNoSignIsTold) {
  grpc::ServerBuilder builder;
  EventLog events;
  // The acceptor is not started, so there is no thread.
  Acceptor acceptor({}, 2, grpc::InsecureServerCredentials(), builder, events);
  const absl::Status status = acceptor.Check(absl::Milliseconds(10));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "the thread that accepts connections has not answered for 10ms");
}

// The options by which the kernel ends the connection of a client whose host is gone.
TEST(ListenAtTcpTest, WhatIsAcceptedEndsAfterASilence) {
  const absl::StatusOr<TcpListeners> listeners = ListenAtTcp("127.0.0.1:0");
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(listeners->port));
  const Descriptor client(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const Descriptor accepted(accept(listeners->sockets.at(0).get(), nullptr, nullptr));
  ASSERT_TRUE(accepted.valid());
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    getsockopt(accepted.get(), level, name, &value, &size);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), 30);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPINTVL), 10);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 60'000);
}

}  // namespace
}  // namespace spillway
