#include "spillway/client.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spillway/error.h"
#include "spillway/tensor.h"
#include "tests/clients/fake_daemon.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

class ClientTest : public ::testing::Test {
 protected:
  // Starts the daemon with the test's settings, and connects a client to it.
  Client& Connect() {
    daemon_.Start();
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(daemon_.target());
    EXPECT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    return *client_;
  }

  // Whether the daemon saw its call cancelled, within 5 seconds.
  bool DaemonSawCancel() {
    for (int wait = 0; wait < 1000 && !daemon_.was_cancelled; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return daemon_.was_cancelled;
  }

  FakeDaemon daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTest, ConnectKeepsTheServerInfo) {
  EXPECT_EQ(Connect().server_info().boot_id(), "b00t");
}

TEST_F(ClientTest, ConnectsPastTheWebProxy) {
  const DeadProxy proxy;
  daemon_.Start();
  const auto client = Client::Connect(daemon_.tcp_target());
  EXPECT_TRUE(client.ok()) << client.status();
}

TEST_F(ClientTest, ConnectSaysWhereNothingAnswers) {
  const auto client = Client::Connect(daemon_.target());
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr(daemon_.target()));
}

TEST_F(ClientTest, ConnectRefusesAnotherMajorVersion) {
  for (const char* version : {"1.0.0", "", "x", "0", "00x.1", "-1.0.0"}) {
    FakeDaemon daemon;
    daemon.info.set_version(version);
    daemon.Start();
    const auto client = Client::Connect(daemon.target());
    EXPECT_EQ(client.status().code(), absl::StatusCode::kFailedPrecondition) << version;
  }
}

TEST_F(ClientTest, ErrorsKeepReasonAndFields) {
  const absl::Status status = Connect().CreateModel("", v1::Model()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "head_dim 17 is not a multiple of 16");
  EXPECT_EQ(ErrorReason(status), "INVALID_MODEL");
  EXPECT_THAT(ErrorMetadata(status), ElementsAre(Pair("boot_id", "b00t")));
  const std::vector<FieldViolation> violations = FieldViolations(status);
  ASSERT_EQ(violations.size(), 2);
  EXPECT_EQ(violations[0].field, "model.head_dim");
  EXPECT_EQ(violations[1].field, "model.dtype");
  EXPECT_EQ(violations[1].description, "is wrong");
}

TEST_F(ClientTest, ListsEveryPage) {
  daemon_.model_pages = {{"models/a", "models/b"}, {}, {"models/c"}};
  const auto models = Connect().ListModels();
  ASSERT_TRUE(models.ok()) << models.status();
  std::vector<std::string> names;
  for (const v1::Model& model : *models) names.push_back(model.name());
  EXPECT_THAT(names, ElementsAre("models/a", "models/b", "models/c"));
}

TEST_F(ClientTest, ReadsEveryPageOfStatistics) {
  v1::GetStatisticsResponse& first = daemon_.statistics_pages[""];
  first.mutable_memory()->set_used_bytes(7);
  first.add_models()->set_model("models/a");
  first.add_sequences()->set_sequence("sequences/a");
  first.add_head_audits();
  first.set_next_page_token("second");
  v1::GetStatisticsResponse& second = daemon_.statistics_pages["second"];
  second.mutable_memory()->set_used_bytes(8);
  second.add_models()->set_model("models/b");
  second.add_sequences()->set_sequence("sequences/b");
  Client& client = Connect();
  const auto all = client.GetStatistics();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->memory().used_bytes(), 7);
  ASSERT_EQ(all->models_size(), 2);
  EXPECT_EQ(all->models(1).model(), "models/b");
  ASSERT_EQ(all->sequences_size(), 2);
  EXPECT_EQ(all->sequences(1).sequence(), "sequences/b");
  EXPECT_EQ(all->head_audits_size(), 1);
  EXPECT_EQ(all->next_page_token(), "");
  // With a model name, each page has this model's statistics.
  const auto of_model = client.GetStatistics("models/a");
  ASSERT_TRUE(of_model.ok()) << of_model.status();
  EXPECT_EQ(of_model->models_size(), 1);
  EXPECT_EQ(of_model->sequences_size(), 2);
}

TEST_F(ClientTest, UploadsTheWholeFileInBoundedPieces) {
  std::string file((size_t{5} << 20) + 3, '\0');
  for (size_t at = 0; at < file.size(); ++at) file[at] = static_cast<char>(at * 31 >> 7);
  const auto model = Connect().UploadHashWeights("models/m", file);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->name(), "models/m");
  EXPECT_EQ(daemon_.uploaded_total_bytes, static_cast<int64_t>(file.size()));
  EXPECT_TRUE(daemon_.uploaded == file);
  EXPECT_LE(daemon_.message_bytes_seen, size_t{2} << 20);
}

// 3 layers, 2 heads, 5000 tokens, 64 elements in f32: 7.7 MB of K, which needs many messages.
struct Rows {
  std::string k = std::string(size_t{3} * 2 * 5000 * 64 * 4, 'k');
  std::string v = std::string(size_t{3} * 2 * 5000 * 64 * 4, 'v');
  KvRows rows = {.sequence = "sequences/s",
                 .layer_count = 3,
                 .token_count = 5000,
                 .kv_head_count = 2,
                 .head_dim = 64,
                 .dtype = v1::DTYPE_F32,
                 .k = k,
                 .v = v};
};

TEST_F(ClientTest, AppendsInMessagesOfTheDaemonsSize) {
  daemon_.info.mutable_limits()->set_message_bytes_max(1 << 20);
  const Rows rows;
  const auto response = Connect().Append(rows.rows);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->appended_chunk_count(), static_cast<int64_t>(daemon_.chunks.size()));
  EXPECT_LE(daemon_.message_bytes_seen, size_t{1} << 20);
  size_t bytes = 0;
  for (const v1::KvChunk& chunk : daemon_.chunks) {
    bytes += chunk.k().data().size() + chunk.v().data().size();
  }
  EXPECT_EQ(bytes, rows.k.size() + rows.v.size());
}

TEST_F(ClientTest, AppendReturnsWhyItWasCutShort) {
  daemon_.refused_chunk = 2;
  const Rows rows;
  const absl::Status status = Connect().Append(rows.rows).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "token_start 7 leaves a gap");
}

TEST_F(ClientTest, AttendSendsAndReturnsTensors) {
  v1::AttendRequest request;
  *request.add_items()->mutable_q() = MakeTensor({1, 2, 2}, {1, 2, 3, 4});
  const auto response = Connect().Attend(request);
  ASSERT_TRUE(response.ok()) << response.status();
  const auto out = FloatValues(response->results(0).out());
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(*out, ElementsAre(1, 2, 3, 4));
}

TEST_F(ClientTest, SavesAndLoadsWithoutADeadline) {
  Client& client = Connect();
  const auto saved = client.SaveSequence("sequences/a", "chats/one", "notes");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->token_count(), 7);
  EXPECT_EQ(daemon_.saved.name(), "sequences/a");
  EXPECT_EQ(daemon_.saved.folder(), "chats/one");
  EXPECT_FALSE(daemon_.had_deadline);
  v1::Sequence wanted;
  wanted.set_model("models/m");
  const auto loaded = client.LoadSequence("chats/one", "b", wanted);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->client_data(), "notes");
  EXPECT_EQ(daemon_.loaded.sequence_id(), "b");
  EXPECT_EQ(daemon_.loaded.sequence().model(), "models/m");
  EXPECT_FALSE(daemon_.had_deadline);
  ASSERT_TRUE(client.SaveSequence("sequences/a", "x", "", {.timeout = absl::Seconds(60)}).ok());
  EXPECT_TRUE(daemon_.had_deadline);
}

TEST_F(ClientTest, DeadlineEndsACall) {
  daemon_.hang = true;
  const absl::Status status = Connect().Attend({}, {.timeout = absl::Milliseconds(50)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(DaemonSawCancel());
}

TEST_F(ClientTest, StopRequestEndsACall) {
  daemon_.hang = true;
  Client& client = Connect();
  std::stop_source source;
  std::jthread stopper([&source] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    source.request_stop();
  });
  const absl::Status status =
      client.Attend({}, {.timeout = absl::Seconds(30), .stop = source.get_token()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(DaemonSawCancel());
}

TEST_F(ClientTest, StopRequestedBeforehandCallsNothing) {
  std::stop_source source;
  source.request_stop();
  daemon_.hang = true;
  const absl::Status status = Connect().Attend({}, {.stop = source.get_token()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

v1::StepRequest AttendAt(int layer) {
  v1::StepRequest request;
  request.mutable_attend()->set_layer(layer);
  return request;
}

TEST_F(ClientTest, StepAnswersErrorsInPlace) {
  const std::unique_ptr<StepStream> stream = Connect().OpenSteps();
  for (int layer = 0; layer < 4; ++layer) {
    v1::StepResponse response;
    ASSERT_TRUE(stream->Attend(AttendAt(layer), response).ok());
    EXPECT_EQ(response.layer(), layer);
    const absl::Status status = ToAbslStatus(response.status());
    EXPECT_EQ(status.ok(), layer % 2 == 0) << status;
    if (!status.ok()) {
      EXPECT_EQ(ErrorReason(status), "INVALID_MODEL");
      EXPECT_EQ(FieldViolations(status).size(), 2);
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ClientTest, StepTellsWhyTheStreamEnded) {
  const std::unique_ptr<StepStream> stream = Connect().OpenSteps();
  v1::StepResponse response;
  EXPECT_EQ(stream->Attend(AttendAt(1000), response).code(), absl::StatusCode::kUnavailable);
  const absl::Status status = stream->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "broken");
}

TEST_F(ClientTest, StepSendsWithoutWaiting) {
  const std::unique_ptr<StepStream> stream = Connect().OpenSteps();
  for (const int layer : {2, 4}) ASSERT_TRUE(stream->Send(AttendAt(layer)).ok());
  for (const int layer : {2, 4}) {
    v1::StepResponse response;
    ASSERT_TRUE(stream->Receive(response).ok());
    EXPECT_EQ(response.layer(), layer);
  }
}

TEST_F(ClientTest, FetchPagesGivesMessagesInOrder) {
  std::vector<int> heads;
  const absl::Status status = Connect().FetchPages({}, [&heads](v1::FetchPagesResponse rows) {
    heads.push_back(rows.kv_head());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(heads, ElementsAre(0, 1, 2));
}

TEST_F(ClientTest, FetchPagesStopsWhenItsCallerDoes) {
  daemon_.fetch_messages = 1'000'000'000;
  const absl::Status status = Connect().FetchPages(
      {}, [](const v1::FetchPagesResponse&) { return absl::DataLossError("no more"); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(DaemonSawCancel());
  EXPECT_LT(daemon_.fetch_messages_sent, daemon_.fetch_messages);
}

TEST(NormalizeTarget, TakesPathsAndTcp) {
  EXPECT_EQ(NormalizeTarget("/run/a.sock"), "unix:/run/a.sock");
  EXPECT_EQ(NormalizeTarget("tcp:127.0.0.1:7311"), "127.0.0.1:7311");
  EXPECT_EQ(NormalizeTarget("unix:/run/a.sock"), "unix:/run/a.sock");
  EXPECT_EQ(NormalizeTarget("dns:///host:1"), "dns:///host:1");
}

}  // namespace
}  // namespace spillway
