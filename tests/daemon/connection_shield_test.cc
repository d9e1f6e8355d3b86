#include "daemon/server/connection_shield.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/server/memory_watch.h"
#include "host/base/descriptor.h"

namespace spillway {
namespace {

using std::chrono::seconds;

// What a client sends: its greeting, calls that begin, and the acknowledgement of SETTINGS.
const std::string kGreeting = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
std::string Calls(int count) {
  std::string frames;
  for (int i = 0; i < count; ++i) {
    frames += std::string_view("\0\0\0\1\4\0\0\0", 8);
    frames += static_cast<char>(1 + 2 * i);
  }
  return frames;
}
const std::string kAcknowledged("\0\0\0\4\1\0\0\0\0", 9);

// A connection that the daemon has accepted, and its client.
class Accepted {
 public:
  Accepted() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    server_ = Descriptor(ends[0]);
    client_ = Descriptor(ends[1]);
    const ConnectionShield::Admission admission(ends[0]);
  }
  ~Accepted() {
    if (auto* const connection = Find(); connection != nullptr) Shield().Forget(*connection);
  }
  static ConnectionShield& Shield() { return ConnectionShield::Get(); }
  ConnectionShield::Connection* Find() const { return ConnectionShield::Find(server_.get()); }
  bool Take(std::string_view bytes) const { return Shield().Take(*Find(), bytes); }
  bool IsEnded() const {
    char byte = 0;
    return recv(client_.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }
  // Waits for the end.
  bool Ends() const {
    char byte = 0;
    return recv(client_.get(), &byte, 1, 0) == 0;
  }

 private:
  Descriptor server_, client_;
};

class ConnectionShieldTest : public ::testing::Test {
 protected:
  ConnectionShieldTest() { shield_.Enable(10); }

  ConnectionShield& shield_ = ConnectionShield::Get();
};

TEST_F(ConnectionShieldTest, EndsAConnectionAndSaysWhy) {
  const Accepted bad, good;
  EXPECT_TRUE(bad.Take(kGreeting + Calls(10)));
  EXPECT_TRUE(good.Take(kGreeting + kAcknowledged + Calls(11)));
  EXPECT_EQ(shield_.TakeEnded().size(), 0);
  const int64_t ended_count = shield_.ended_count();
  EXPECT_FALSE(bad.Take(Calls(11).substr(90)));
  EXPECT_FALSE(bad.Take(Calls(1)));
  EXPECT_TRUE(bad.IsEnded());
  EXPECT_FALSE(good.IsEnded());
  EXPECT_EQ(shield_.ended_count(), ended_count + 1);
  const std::vector<ConnectionShield::Ended> ended = shield_.TakeEnded();
  ASSERT_EQ(ended.size(), 1);
  EXPECT_EQ(ended[0].peer.substr(0, 4), "pid ");
  EXPECT_NE(ended[0].reason.find("SETTINGS"), std::string::npos) << ended[0].reason;
}

TEST_F(ConnectionShieldTest, EndsConnectionsWithoutAnAcknowledgement) {
  const Accepted silent, greeting, acknowledged;
  EXPECT_TRUE(greeting.Take(kGreeting));
  EXPECT_TRUE(acknowledged.Take(kGreeting + kAcknowledged));
  const auto now = ConnectionShield::Clock::now();
  shield_.EndSilent(now + ConnectionShield::kGreetingMax - seconds(5));
  EXPECT_FALSE(silent.IsEnded());
  shield_.EndSilent(now + ConnectionShield::kGreetingMax);
  EXPECT_TRUE(silent.IsEnded());
  EXPECT_TRUE(greeting.IsEnded());
  EXPECT_FALSE(acknowledged.IsEnded());
}

TEST_F(ConnectionShieldTest, ForgetsADescriptorThatIsClosed) {
  const Accepted connection;
  ASSERT_NE(connection.Find(), nullptr);
  shield_.Forget(*connection.Find());
  EXPECT_EQ(connection.Find(), nullptr);
  shield_.EndSilent(ConnectionShield::Clock::now() + ConnectionShield::kGreetingMax);
  EXPECT_FALSE(connection.IsEnded());
  EXPECT_EQ(ConnectionShield::Find(-1), nullptr);
  EXPECT_EQ(ConnectionShield::Find(1 << 30), nullptr);
}

TEST_F(ConnectionShieldTest, TheWatchEndsTheBusiestConnection) {
  const Accepted quiet, busy;
  EXPECT_TRUE(quiet.Take(kGreeting + kAcknowledged + Calls(10)));
  EXPECT_TRUE(busy.Take(kGreeting + kAcknowledged + Calls(100)));
  EventLog events;
  {
    const MemoryWatch enough(0, events);
    absl::SleepFor(absl::Milliseconds(200));
  }
  EXPECT_FALSE(busy.IsEnded());
  const MemoryWatch exceeded(-2 * MemoryWatch::kAllowanceBytes, events);
  EXPECT_TRUE(busy.Ends());
  EXPECT_FALSE(quiet.IsEnded());
}

}  // namespace
}  // namespace spillway
