// Streams of Connect, which show a daemon that a client is connected.
#include "spillway/presence.h"

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spillway/client.h"
#include "tests/clients/fake_daemon.h"

namespace spillway {
namespace {

using ::testing::MatchesRegex;

constexpr char kId[] = "[0-9a-f]+";

// Whether the condition becomes true within a minute.
bool Settles(const std::function<bool()>& condition) {
  for (int wait = 0; wait < 12000 && !condition(); ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

TEST(PresenceTest, AClientIsThereFromItsFirstCallToItsEnd) {
  FakeDaemon daemon;
  daemon.connects = true;
  daemon.Start();
  auto client = Client::Connect(daemon.target());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 1; }));
  EXPECT_THAT(daemon.connected_id(), MatchesRegex(kId));
  EXPECT_EQ(daemon.connected_id().size(), 32);
  EXPECT_EQ(daemon.asking_id(), daemon.connected_id());
  client->reset();
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 0; }));
}

TEST(PresenceTest, ComesAgainAsTheSameWithoutACall) {
  FakeDaemon daemon;
  daemon.connects = true;
  daemon.Start();
  const auto client = Client::Connect(daemon.target());
  ASSERT_TRUE(Settles([&] { return daemon.connected_count == 1; }));
  const std::string id = daemon.connected_id();
  daemon.disconnect = true;
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 0; }));
  daemon.disconnect = false;
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 1; }));
  EXPECT_EQ(daemon.connected_id(), id);
}

TEST(PresenceTest, ADaemonThatDoesNotKnowTheCallIsServedByAsBefore) {
  FakeDaemon daemon;
  daemon.Start();
  const auto client = Client::Connect(daemon.target());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->GetServerInfo().ok());
}

}  // namespace
}  // namespace spillway
