#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "spillway.h"
#include "spillway/v1/attention_service.pb.h"
#include "tests/clients/fake_daemon.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr double kForEver = -1;
constexpr double kNoLimit = 0;

class DecodeInCTest : public ::testing::Test {
 protected:
  ~DecodeInCTest() override {
    if (stream_ != nullptr) spillway_decode_close(stream_);
  }

  void Open(double timeout_seconds = kNoLimit) {
    stream_ = spillway_decode_open(daemon_.target().c_str(), timeout_seconds);
  }

  int Send(uint64_t id, size_t padding = 0) {
    v1::DecodeRequest request;
    request.set_correlation_id(id);
    request.mutable_q()->set_data(std::string(padding, 'q'));
    const std::string message = request.SerializeAsString();
    return spillway_decode_send(stream_, message.data(), message.size());
  }

  int Receive(double timeout_seconds = kForEver) {
    const void* message = nullptr;
    size_t size = 0;
    const int result = spillway_decode_receive(stream_, timeout_seconds, &message, &size);
    if (result == SPILLWAY_RECEIVED) {
      EXPECT_TRUE(response_.ParseFromArray(message, static_cast<int>(size)));
    }
    return result;
  }

  // How the stream ended.
  google::rpc::Status End() {
    const char* message = nullptr;
    const void* details = nullptr;
    size_t size = 0;
    google::rpc::Status status;
    const int code = spillway_decode_status(stream_, &message, &details, &size);
    EXPECT_TRUE(status.ParseFromArray(details, static_cast<int>(size)));
    if (size == 0) {
      status.set_code(code);
      status.set_message(message);
    }
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(status.message(), message);
    return status;
  }

  FakeDaemon daemon_;
  spillway_decode_stream* stream_ = nullptr;
  v1::DecodeResponse response_;
};

TEST_F(DecodeInCTest, MovesMessages) {
  EXPECT_EQ(spillway_interface(), SPILLWAY_INTERFACE);
  daemon_.Start();
  Open();
  for (uint64_t id = 1; id < 50; ++id) {
    ASSERT_EQ(Send(id, id * 1000), 0);
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.correlation_id(), id);
    EXPECT_EQ(response_.result().status().code() == 0, id % 2 == 0);
  }
}

TEST_F(DecodeInCTest, ManySendsBeforeOneReceive) {
  daemon_.Start();
  Open();
  // More than fits between the two: what cannot go out is kept.
  for (uint64_t id = 1; id <= 300; ++id) ASSERT_EQ(Send(2 * id, 100'000), 0);
  for (uint64_t id = 1; id <= 300; ++id) {
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.correlation_id(), 2 * id);
  }
}

TEST_F(DecodeInCTest, OneThreadSendsWhileAnotherReceives) {
  daemon_.Start();
  Open();
  std::thread sender([this] {
    for (uint64_t id = 1; id <= 2000; ++id) ASSERT_EQ(Send(2000 + 2 * id, id * 37 % 20'000), 0);
  });
  for (uint64_t id = 1; id <= 2000; ++id) {
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.correlation_id(), 2000 + 2 * id);
  }
  sender.join();
}

TEST_F(DecodeInCTest, ReceiveGivesUpAndGoesOn) {
  daemon_.Start();
  Open();
  EXPECT_EQ(Receive(0), SPILLWAY_TIMED_OUT);
  EXPECT_EQ(Receive(0.02), SPILLWAY_TIMED_OUT);
  ASSERT_EQ(Send(2), 0);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  EXPECT_EQ(response_.correlation_id(), 2);
  EXPECT_EQ(Receive(0.02), SPILLWAY_TIMED_OUT);
}

TEST_F(DecodeInCTest, TellsWhyTheStreamEnded) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(1000), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(End().message(), "broken");
  EXPECT_EQ(Send(2), -1);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
}

TEST_F(DecodeInCTest, KeepsTheDetails) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(1001), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().SerializeAsString(), RefusalDetails().SerializeAsString());
}

TEST_F(DecodeInCTest, NobodyAnswers) {
  Open();
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(End().message(), HasSubstr(daemon_.target().substr(5)));
}

TEST_F(DecodeInCTest, ConnectsPastTheWebProxy) {
  const DeadProxy proxy;
  daemon_.Start();
  stream_ = spillway_decode_open(daemon_.tcp_target().c_str(), kNoLimit);
  ASSERT_EQ(Send(2), 0);
  EXPECT_EQ(Receive(), SPILLWAY_RECEIVED);
}

TEST_F(DecodeInCTest, TheTimeEnds) {
  daemon_.Start();
  Open(/*timeout_seconds=*/0.05);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(DecodeInCTest, AnotherThreadCancels) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(2), 0);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  std::thread canceller([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    spillway_decode_cancel(stream_);
  });
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::CANCELLED);
  canceller.join();
}

TEST_F(DecodeInCTest, ClosedWithMessagesInFlight) {
  daemon_.Start();
  Open();
  for (uint64_t id = 1; id <= 300; ++id) ASSERT_EQ(Send(2 * id, 100'000), 0);
}

TEST_F(DecodeInCTest, AnswerBeyondTheLargestMessage) {
  daemon_.answer_bytes = 5 << 20;
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(2), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace spillway
