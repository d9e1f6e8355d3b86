#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "spillway.h"
#include "spillway/v1/admin_service.pb.h"
#include "spillway/v1/attention_service.pb.h"
#include "spillway/v1/memory_service.pb.h"
#include "spillway/v1/model_service.pb.h"
#include "spillway/v1/sequence_service.pb.h"
#include "tests/clients/fake_daemon.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr double kForEver = -1;
constexpr double kNoLimit = 0;

class CallInCTest : public ::testing::Test {
 protected:
  ~CallInCTest() override {
    if (call_ != nullptr) spillway_call_close(call_);
    if (channel_ != nullptr) spillway_channel_close(channel_);
  }

  void Open(double timeout_seconds = kNoLimit) { OpenAt(daemon_.target(), timeout_seconds); }

  void OpenAt(const std::string& target, double timeout_seconds = kNoLimit) {
    channel_ = spillway_channel_open(target.c_str(), nullptr);
    call_ = spillway_call_open(channel_, "/spillway.v1.AttentionService/Step", timeout_seconds,
                               nullptr, 0);
  }

  int Send(int layer, size_t padding = 0, double timeout_seconds = kForEver) {
    v1::StepRequest request;
    request.mutable_attend()->set_layer(layer);
    request.mutable_attend()->mutable_q()->set_data(std::string(padding, 'q'));
    const std::string message = request.SerializeAsString();
    return spillway_call_send(call_, message.data(), message.size(), timeout_seconds);
  }

  int Receive(double timeout_seconds = kForEver) {
    const void* message = nullptr;
    size_t size = 0;
    const int result = spillway_call_receive(call_, timeout_seconds, &message, &size);
    if (result == SPILLWAY_RECEIVED) {
      EXPECT_TRUE(response_.ParseFromArray(message, static_cast<int>(size)));
    }
    return result;
  }

  // The status with which the stream ended.
  google::rpc::Status End() {
    const char* message = nullptr;
    const void* details = nullptr;
    size_t size = 0;
    google::rpc::Status status;
    const int code = spillway_call_status(call_, &message, &details, &size);
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
  spillway_channel* channel_ = nullptr;
  spillway_call* call_ = nullptr;
  v1::StepResponse response_;
};

TEST_F(CallInCTest, MovesMessages) {
  EXPECT_EQ(spillway_interface(), SPILLWAY_INTERFACE);
  daemon_.Start();
  Open();
  for (int id = 1; id < 50; ++id) {
    ASSERT_EQ(Send(id, id * 1000), 0);
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.layer(), id);
    EXPECT_EQ(response_.status().code() == 0, id % 2 == 0);
  }
}

TEST_F(CallInCTest, ManySendsBeforeOneReceive) {
  daemon_.Start();
  Open();
  // More than the transport buffers: what cannot be sent yet is kept.
  for (int id = 1; id <= 60; ++id) ASSERT_EQ(Send(2 * id, 100'000), 0);
  for (int id = 1; id <= 60; ++id) {
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.layer(), 2 * id);
  }
}

TEST_F(CallInCTest, KeepsNoMoreThanItsLimit) {
  // Answers that nobody receives keep the daemon from reading on.
  daemon_.answer_bytes = 1'000'000;
  daemon_.Start();
  Open();
  int sent = 0;
  while (sent < 400 && Send(2 * (sent + 1), 1'000'000, 2) == 0) ++sent;
  // What the call keeps, and what the transport and the daemon buffer.
  EXPECT_GE(sent, 8);
  EXPECT_LT(sent, 60);
  for (int id = 1; id <= sent; ++id) {
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.layer(), 2 * id);
  }
  // A message that was not taken is not sent, and the call goes on.
  EXPECT_EQ(Receive(0.05), SPILLWAY_TIMED_OUT);
  ASSERT_EQ(Send(7002, 1'000'000), 0);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  EXPECT_EQ(response_.layer(), 7002);
}

TEST_F(CallInCTest, TakesAMessageLargerThanItsLimit) {
  daemon_.Start();
  Open();
  EXPECT_EQ(Send(2, (8 << 20) + 1, 0), 0);
}

TEST_F(CallInCTest, ASendThatWaitsEndsWithTheCall) {
  daemon_.silent = true;
  daemon_.Start();
  Open();
  std::thread canceller([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    spillway_call_cancel(call_);
  });
  int sent = 0, result = 0;
  while (sent < 400 && (result = Send(2, 1'000'000)) == 0) ++sent;
  EXPECT_EQ(result, -1);
  EXPECT_LT(sent, 60);
  canceller.join();
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::CANCELLED);
}

TEST_F(CallInCTest, OneThreadSendsWhileAnotherReceives) {
  daemon_.Start();
  Open();
  std::thread sender([this] {
    for (int id = 1; id <= 2000; ++id) ASSERT_EQ(Send(2000 + 2 * id, id * 37 % 20'000), 0);
  });
  for (int id = 1; id <= 2000; ++id) {
    ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
    EXPECT_EQ(response_.layer(), 2000 + 2 * id);
  }
  sender.join();
}

TEST_F(CallInCTest, ReceiveGivesUpAndGoesOn) {
  daemon_.Start();
  Open();
  EXPECT_EQ(Receive(0), SPILLWAY_TIMED_OUT);
  EXPECT_EQ(Receive(0.02), SPILLWAY_TIMED_OUT);
  ASSERT_EQ(Send(2), 0);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  EXPECT_EQ(response_.layer(), 2);
  EXPECT_EQ(Receive(0.02), SPILLWAY_TIMED_OUT);
}

TEST_F(CallInCTest, TellsWhyTheStreamEnded) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(1000), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(End().message(), "broken");
  EXPECT_EQ(Send(2), -1);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
}

TEST_F(CallInCTest, KeepsTheDetails) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(1001), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().SerializeAsString(), RefusalDetails().SerializeAsString());
}

TEST_F(CallInCTest, NobodyAnswers) {
  Open();
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(End().message(), HasSubstr(daemon_.target().substr(5)));
}

TEST_F(CallInCTest, ConnectsPastTheWebProxy) {
  const DeadProxy proxy;
  daemon_.Start();
  OpenAt(daemon_.tcp_target());
  ASSERT_EQ(Send(2), 0);
  EXPECT_EQ(Receive(), SPILLWAY_RECEIVED);
}

TEST_F(CallInCTest, TheTimeEnds) {
  daemon_.Start();
  Open(/*timeout_seconds=*/0.05);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(CallInCTest, AnotherThreadCancels) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(2), 0);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  std::thread canceller([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    spillway_call_cancel(call_);
  });
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::CANCELLED);
  canceller.join();
}

TEST_F(CallInCTest, ClosedWithMessagesInFlight) {
  daemon_.Start();
  Open();
  for (int id = 1; id <= 300; ++id) ASSERT_EQ(Send(2 * id, 100'000), 0);
}

TEST_F(CallInCTest, AnswerBeyondTheLargestMessage) {
  daemon_.answer_bytes = 5 << 20;
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(2), 0);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(CallInCTest, EndsWhenAllWasSent) {
  daemon_.Start();
  Open();
  ASSERT_EQ(Send(2), 0);
  spillway_call_send_end(call_);
  ASSERT_EQ(Receive(), SPILLWAY_RECEIVED);
  EXPECT_EQ(Receive(), SPILLWAY_ENDED);
  EXPECT_EQ(End().code(), grpc::StatusCode::OK);
}

// Calls a unary method.
std::string Unary(spillway_channel* channel, const char* method, const std::string& request,
                  int& code) {
  spillway_call* const call = spillway_call_open(channel, method, kNoLimit, nullptr, 0);
  EXPECT_EQ(spillway_call_send(call, request.data(), request.size(), kForEver), 0);
  spillway_call_send_end(call);
  const void* data = nullptr;
  size_t size = 0;
  std::string response;
  if (spillway_call_receive(call, kForEver, &data, &size) == SPILLWAY_RECEIVED) {
    response.assign(static_cast<const char*>(data), size);
    EXPECT_EQ(spillway_call_receive(call, kForEver, &data, &size), SPILLWAY_ENDED);
  }
  const char* message = nullptr;
  code = spillway_call_status(call, &message, &data, &size);
  spillway_call_close(call);
  return response;
}

TEST(EmbedInCTest, AnswersAsADaemonDoes) {
  const char* const settings[] = {"memory.limit=64MiB", "device.name=cpu", "device.thread_count=1"};
  spillway_channel* const channel = spillway_channel_embed(settings, 3);
  ASSERT_NE(channel, nullptr);
  int code = -1;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(
      info.ParseFromString(Unary(channel, "/spillway.v1.AdminService/GetServerInfo", "", code)));
  EXPECT_EQ(code, grpc::StatusCode::OK);
  EXPECT_EQ(info.limits().memory_bytes_max(), 64 << 20);
  ASSERT_EQ(info.devices_size(), 1);
  EXPECT_EQ(info.devices(0).name(), "cpu:0");
  EXPECT_EQ(info.devices(0).thread_count(), 1);
  v1::GetModelRequest request;
  request.set_name("models/none");
  Unary(channel, "/spillway.v1.ModelService/GetModel", request.SerializeAsString(), code);
  EXPECT_EQ(code, grpc::StatusCode::NOT_FOUND);
  // A call may outlive the engine.
  spillway_call* const left =
      spillway_call_open(channel, "/spillway.v1.AttentionService/Step", kNoLimit, nullptr, 0);
  spillway_channel_close(channel);
  const void* data = nullptr;
  size_t size = 0;
  EXPECT_EQ(spillway_call_receive(left, kForEver, &data, &size), SPILLWAY_ENDED);
  spillway_call_close(left);
}

TEST(EmbedInCTest, ACallHasATraceThatGoesIntoALogOrIsNotOpened) {
  const char* const settings[] = {"memory.limit=64MiB", "device.name=cpu", "device.thread_count=1"};
  spillway_channel* const channel = spillway_channel_embed(settings, 3);
  ASSERT_NE(channel, nullptr);
  const char* const method = "/spillway.v1.AdminService/GetServerInfo";
  for (const char* const trace : {static_cast<const char*>(nullptr), "", "job-7/3"}) {
    spillway_call* const call = spillway_call_open(channel, method, kNoLimit, trace, 0);
    EXPECT_NE(call, nullptr);
    spillway_call_close(call);
  }
  EXPECT_EQ(spillway_call_open(channel, method, kNoLimit, "two words", 0), nullptr);
  const char* message = nullptr;
  const void* details = nullptr;
  size_t size = 0;
  EXPECT_EQ(spillway_error(&message, &details, &size), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(std::string(message).find("trace_id: \"two words\", 9 characters"), std::string::npos);
  spillway_channel_close(channel);
}

// Code and message of the last function that failed.
std::pair<int, std::string> Failure() {
  const char* message = nullptr;
  const void* details = nullptr;
  size_t size = 0;
  const int code = spillway_error(&message, &details, &size);
  return {code, message};
}

class StepInCTest : public ::testing::Test {
 protected:
  StepInCTest() {
    v1::DecodeStep step;
    step.set_token_count(1);
    step.add_parts()->set_sequence("sequences/s");
    description_ = step.SerializeAsString();
    for (spillway_tensor* tensor : {&tensors_.q, &tensors_.k, &tensors_.v, &tensors_.out}) {
      *tensor = {elements_.data(), 0, 0, 4};
    }
  }

  spillway_step* Begin(spillway_channel* channel) {
    return spillway_step_begin(channel, description_.data(), description_.size(), &shape_,
                               carrier_);
  }

  std::string description_;
  std::string other_ = "\xff";
  spillway_step_shape shape_ = {2, 1, 1, SPILLWAY_F32};
  int carrier_ = SPILLWAY_MESSAGES;
  std::vector<float> elements_ = std::vector<float>(2);
  spillway_step_tensors tensors_ = {SPILLWAY_F32, SPILLWAY_F32, {}, {}, {}, {}, nullptr};
};

TEST_F(StepInCTest, RefusesWhatIsNoStepOfADaemon) {
  spillway_channel* channel = spillway_channel_open("unix:/none", nullptr);
  shape_.head_dim = 0;
  EXPECT_EQ(Begin(channel), nullptr);
  EXPECT_EQ(Failure().first, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Failure().second, HasSubstr("2 query heads, 1 KV heads of 0 and row_dtype 1"));
  shape_.head_dim = 1;
  for (const int carrier : {-1, 4}) {
    carrier_ = carrier;
    EXPECT_EQ(Begin(channel), nullptr);
    EXPECT_EQ(Failure().first, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(Failure().second, HasSubstr(absl::StrCat("carrier ", carrier, " is not one of")));
  }
  EXPECT_EQ(spillway_step_begin(channel, description_.data(), description_.size(), nullptr,
                                SPILLWAY_BEST),
            nullptr);
  EXPECT_EQ(Failure().second, "shape: is NULL");
  carrier_ = SPILLWAY_IN_PLACE;
  EXPECT_EQ(Begin(channel), nullptr);
  EXPECT_EQ(Failure().first, grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(Failure().second, HasSubstr("the engine is in a daemon"));
  carrier_ = SPILLWAY_MESSAGES;
  std::swap(description_, other_);
  EXPECT_EQ(Begin(channel), nullptr);
  EXPECT_EQ(Failure(),
            std::pair(static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT),
                      std::string("the description is not a serialised spillway.v1.DecodeStep")));
  description_ = "";
  EXPECT_EQ(Begin(channel), nullptr);
  EXPECT_THAT(Failure().second, HasSubstr("parts: 0 sequences are not in [1, 256]"));
  description_ = other_;
  spillway_channel_close(channel);
  const char* const settings[] = {"memory.limit=64MiB", "device.name=cpu", "device.thread_count=1"};
  channel = spillway_channel_embed(settings, 3);
  for (const int carrier : {SPILLWAY_DOORBELL, SPILLWAY_MESSAGES}) {
    carrier_ = carrier;
    EXPECT_EQ(Begin(channel), nullptr);
    EXPECT_EQ(Failure().first, grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(Failure().second, HasSubstr("only SPILLWAY_IN_PLACE is possible"));
  }
  spillway_channel_close(channel);
}

TEST_F(StepInCTest, GoesByMessagesWhereNoMemoryIsShared) {
  FakeDaemon daemon;
  daemon.answer_bytes = daemon.lse_bytes = 2 * sizeof(float);
  daemon.Start();
  carrier_ = SPILLWAY_BEST;
  for (const auto& [target, reason] :
       {std::pair(daemon.tcp_target(), "no doorbell: it needs a unix socket of the daemon"),
        std::pair(daemon.target(), "no doorbell: the daemon shares no memory")}) {
    spillway_channel* const channel = spillway_channel_open(target.c_str(), nullptr);
    for (int i = 0; i < 2; ++i) {
      spillway_step* const step = Begin(channel);
      ASSERT_NE(step, nullptr);
      const char* told = nullptr;
      EXPECT_EQ(spillway_step_carrier(step, &told), SPILLWAY_MESSAGES);
      EXPECT_STREQ(told, reason);
      EXPECT_EQ(spillway_step_carrier(step, nullptr), SPILLWAY_MESSAGES);
      spillway_step_end(step);
    }
    carrier_ = SPILLWAY_DOORBELL;
    EXPECT_EQ(Begin(channel), nullptr);
    EXPECT_EQ(Failure(),
              std::pair(static_cast<int>(grpc::StatusCode::UNIMPLEMENTED), std::string(reason)));
    carrier_ = SPILLWAY_BEST;
    spillway_channel_close(channel);
  }
}

TEST_F(StepInCTest, OneThatFailsLeavesTheOthersAlone) {
  FakeDaemon daemon;
  daemon.refuses_every_other = true;
  // Its answers are not valid for a step: the output has 4 bytes, and there is no log-sum-exp.
  daemon.answer_bytes = 4;
  daemon.Start();
  spillway_channel* const there = spillway_channel_open(daemon.target().c_str(), nullptr);
  spillway_channel* const gone = spillway_channel_open("unix:/none", nullptr);
  spillway_step_share shares[] = {{Begin(gone), 0, 0, 0, 1, 0, 0, nullptr},
                                  {Begin(there), 0, 0, 0, 1, 0, 0, nullptr}};
  ASSERT_NE(shares[0].step, nullptr);
  ASSERT_NE(shares[1].step, nullptr);
  EXPECT_EQ(spillway_steps_attend(shares, 2, 0, &tensors_, kForEver),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(shares[0].code, grpc::StatusCode::UNAVAILABLE);
  // The daemon refuses every other attend, from the first on.
  EXPECT_EQ(shares[1].code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(spillway_steps_attend(shares + 1, 1, 0, &tensors_, kForEver),
            grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Failure().second, "the daemon's answer is not valid");
  EXPECT_EQ(spillway_steps_await(shares, 2, &tensors_, 0), grpc::StatusCode::UNAVAILABLE);
  for (const spillway_step_share& share : shares) spillway_step_end(share.step);
  spillway_channel_close(there);
  spillway_channel_close(gone);
}

// The daemon may have the tensors of some sequences only.
TEST_F(StepInCTest, AfterAFailureTheNextAttendBeginsTheStepOnANewStream) {
  FakeDaemon daemon;
  daemon.refuses_every_other = true;
  // Valid answers: two query heads of one float.
  daemon.answer_bytes = daemon.lse_bytes = 2 * sizeof(float);
  daemon.Start();
  spillway_channel* const channel = spillway_channel_open(daemon.target().c_str(), nullptr);
  spillway_step* const step = Begin(channel);
  ASSERT_NE(step, nullptr);
  for (const int streams : {1, 2}) {
    EXPECT_EQ(spillway_step_attend(step, 0, &tensors_, -1), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(daemon.stream_count, streams);
    EXPECT_EQ(daemon.begin_count, streams);
    EXPECT_EQ(spillway_step_attend(step, 0, &tensors_, -1), 0);
    EXPECT_EQ(daemon.stream_count, streams + 1);
    EXPECT_EQ(daemon.begin_count, streams + 1);
  }
  spillway_step_end(step);
  spillway_channel_close(channel);
}

TEST_F(StepInCTest, AsLongAsOneIsUnansweredSoAreAll) {
  FakeDaemon daemon;
  daemon.refuses_every_other = true;
  daemon.silent = true;
  daemon.Start();
  spillway_channel* const there = spillway_channel_open(daemon.target().c_str(), nullptr);
  spillway_channel* const gone = spillway_channel_open("unix:/none", nullptr);
  spillway_step_share shares[] = {{Begin(gone), 0, 0, 0, 1, 0, 0, nullptr},
                                  {Begin(there), 0, 0, 0, 1, 0, 0, nullptr}};
  int code = spillway_steps_attend(shares, 2, 0, &tensors_, 0.05);
  while (shares[0].code == SPILLWAY_UNANSWERED) {
    ASSERT_EQ(code, SPILLWAY_UNANSWERED);
    code = spillway_steps_await(shares, 2, &tensors_, 0.05);
  }
  EXPECT_EQ(shares[0].code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(shares[1].code, SPILLWAY_UNANSWERED);
  EXPECT_EQ(code, SPILLWAY_UNANSWERED);
  daemon.silent = false;
  EXPECT_EQ(spillway_steps_await(shares, 2, &tensors_, kForEver), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(shares[1].code, grpc::StatusCode::INVALID_ARGUMENT);
  for (const spillway_step_share& share : shares) spillway_step_end(share.step);
  spillway_channel_close(there);
  spillway_channel_close(gone);
}

TEST(RegionInCTest, WhatIsNoHandleOrNoGpuOfThisProcessIsRefused) {
  spillway_channel* const channel = spillway_channel_open("unix:/tmp/none", nullptr);
  for (const auto& [size, code] : {std::pair(size_t{5}, grpc::StatusCode::INVALID_ARGUMENT),
                                   std::pair(size_t{64}, grpc::StatusCode::NOT_FOUND)}) {
    v1::AttachRegionResponse response;
    response.mutable_region()->set_name("regions/1");
    response.mutable_region()->set_byte_count(1 << 21);
    response.mutable_region()->set_device("GPU-none");
    response.set_ipc_handle(std::string(size, '\0'));
    const std::string bytes = response.SerializeAsString();
    spillway_region_place place = {};
    EXPECT_EQ(spillway_region_map(channel, bytes.data(), bytes.size(), &place), nullptr);
    const auto [told, message] = Failure();
    // A build without CUDA cannot map memory.
    EXPECT_TRUE(told == code || told == grpc::StatusCode::UNIMPLEMENTED) << told << message;
    EXPECT_EQ(place.address, nullptr);
  }
  spillway_channel_close(channel);
}

TEST(RegionInCTest, NeedsADaemonThatSharesMemory) {
  char name[SPILLWAY_SESSION_BYTES_MAX];
  FakeDaemon daemon;
  daemon.Start();
  const char* const settings[] = {"memory.limit=64MiB", "device.name=cpu", "device.thread_count=1"};
  for (const auto& [channel, told] :
       {std::pair(spillway_channel_open(daemon.tcp_target().c_str(), nullptr),
                  "no regions: it needs a unix socket of the daemon"),
        std::pair(spillway_channel_open(daemon.target().c_str(), nullptr),
                  "no regions: the daemon shares no memory"),
        std::pair(spillway_channel_embed(settings, 3),
                  "an embedded engine reads memory of its process without regions")}) {
    EXPECT_EQ(spillway_session(channel, name, sizeof(name)), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_EQ(Failure(), std::pair(int{grpc::StatusCode::UNIMPLEMENTED}, std::string(told)));
    spillway_session_leave(channel);
    spillway_channel_close(channel);
  }
}

TEST(EmbedInCTest, DecodersAreOfAnEngineOnAGpu) {
  const auto refused = [](spillway_channel* channel, const std::string& description) {
    EXPECT_EQ(spillway_decoder_open(channel, description.data(), description.size(), 100), nullptr);
    const char* message = nullptr;
    const void* details = nullptr;
    size_t size = 0;
    const int code = spillway_error(&message, &details, &size);
    spillway_channel_close(channel);
    return std::pair(code, std::string(message));
  };
  EXPECT_EQ(refused(spillway_channel_open("unix:/tmp/none", nullptr), "").first,
            grpc::StatusCode::UNAVAILABLE);
  const auto over_tcp = refused(spillway_channel_open("localhost:1", nullptr), "");
  EXPECT_EQ(over_tcp.first, grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(over_tcp.second, "no doorbell: it needs a unix socket of the daemon");

  const char* const settings[] = {"memory.limit=64MiB", "device.name=cpu", "device.thread_count=1"};
  EXPECT_EQ(refused(spillway_channel_embed(settings, 3), "\xff").first,
            grpc::StatusCode::INVALID_ARGUMENT);
  spillway_channel* const channel = spillway_channel_embed(settings, 3);
  int code = -1;
  v1::CreateModelRequest model;
  model.set_model_id("m");
  model.mutable_model()->set_layer_count(1);
  model.mutable_model()->set_query_head_count(1);
  model.mutable_model()->set_kv_head_count(1);
  model.mutable_model()->set_head_dim(16);
  model.mutable_model()->set_dtype(v1::DTYPE_F32);
  Unary(channel, "/spillway.v1.ModelService/CreateModel", model.SerializeAsString(), code);
  ASSERT_EQ(code, grpc::StatusCode::OK);
  v1::CreateSequenceRequest sequence;
  sequence.set_sequence_id("s");
  sequence.mutable_sequence()->set_model("models/m");
  Unary(channel, "/spillway.v1.SequenceService/CreateSequence", sequence.SerializeAsString(), code);
  ASSERT_EQ(code, grpc::StatusCode::OK);
  v1::DecodeStep step;
  step.set_token_count(1);
  step.add_parts()->set_sequence("sequences/s");
  const auto on_cpu = refused(channel, step.SerializeAsString());
  EXPECT_EQ(on_cpu.first, grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(on_cpu.second, "cpu:0 has no streams: steps on streams are for GPUs");
}

TEST(EmbedInCTest, RefusesWhatItCannotBe) {
  const char* message = nullptr;
  const void* details = nullptr;
  size_t size = 0;
  struct Case {
    const char* setting;
    grpc::StatusCode code;
    const char* told;
  };
  for (const Case& refused : {
           Case{"memory.limit=much", grpc::StatusCode::INVALID_ARGUMENT, "memory.limit: \"much\""},
           Case{"memory.limit", grpc::StatusCode::INVALID_ARGUMENT, "memory.limit: \"\""},
           Case{"memory.limits=1GiB", grpc::StatusCode::INVALID_ARGUMENT,
                "unknown key memory.limits"},
           Case{"server.listen=unix:/tmp/s", grpc::StatusCode::INVALID_ARGUMENT,
                "server.listen: an embedded engine does not listen"},
       }) {
    EXPECT_EQ(spillway_channel_embed(&refused.setting, 1), nullptr);
    EXPECT_EQ(spillway_error(&message, &details, &size), refused.code);
    EXPECT_THAT(message, HasSubstr(refused.told));
  }
  const char* const twice[] = {"device.name=cpu", "device.name=auto"};
  EXPECT_EQ(spillway_channel_embed(twice, 2), nullptr);
  EXPECT_EQ(spillway_error(&message, &details, &size), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_STREQ(message, "device.name: named twice");
}

// Whether the condition becomes true within a minute.
bool Settles(const std::function<bool()>& condition) {
  for (int wait = 0; wait < 12000 && !condition(); ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

// Calls GetServerInfo and waits for the answer.
void Ask(spillway_channel* channel, int options = 0) {
  spillway_call* const call =
      spillway_call_open(channel, "/spillway.v1.AdminService/GetServerInfo", 60, nullptr, options);
  EXPECT_EQ(spillway_call_send(call, "", 0, kForEver), 0);
  spillway_call_send_end(call);
  const void* message = nullptr;
  size_t size = 0;
  EXPECT_EQ(spillway_call_receive(call, 60, &message, &size), SPILLWAY_RECEIVED);
  spillway_call_close(call);
}

TEST(PresenceInCTest, AChannelOfLibspillwayIsAClientOfItsOwn) {
  FakeDaemon daemon;
  daemon.connects = true;
  daemon.Start();
  spillway_channel* const channel = spillway_channel_open(daemon.target().c_str(), nullptr);
  Ask(channel);
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 1; }));
  EXPECT_EQ(daemon.asking_id(), daemon.connected_id());
  spillway_channel_close(channel);
  EXPECT_TRUE(Settles([&] { return daemon.connected_count == 0; }));
}

TEST(PresenceInCTest, ACallMayNotNameItsClient) {
  FakeDaemon daemon;
  daemon.Start();
  spillway_channel* const channel = spillway_channel_open(daemon.target().c_str(), nullptr);
  Ask(channel, SPILLWAY_WITHOUT_CLIENT);
  EXPECT_EQ(daemon.asking_id(), "");
  Ask(channel);
  EXPECT_NE(daemon.asking_id(), "");
  spillway_channel_close(channel);
}

}  // namespace
}  // namespace spillway
