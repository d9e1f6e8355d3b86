// A gRPC server that answers as the test sets it, on a unix socket in its own folder and on
// loopback.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "spillway/v1/admin_service.grpc.pb.h"
#include "spillway/v1/attention_service.grpc.pb.h"
#include "spillway/v1/model_service.grpc.pb.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace spillway {

// An error as the daemon sends it, with ErrorInfo and BadRequest in the details.
inline google::rpc::Status RefusalDetails() {
  google::rpc::Status status;
  status.set_code(grpc::StatusCode::INVALID_ARGUMENT);
  status.set_message("head_dim 17 is not a multiple of 16");
  google::rpc::ErrorInfo info;
  info.set_reason("INVALID_MODEL");
  info.set_domain("spillway");
  (*info.mutable_metadata())["boot_id"] = "b00t";
  status.add_details()->PackFrom(info);
  google::rpc::BadRequest request;
  for (const char* field : {"model.head_dim", "model.dtype"}) {
    auto* violation = request.add_field_violations();
    violation->set_field(field);
    violation->set_description("is wrong");
  }
  status.add_details()->PackFrom(request);
  return status;
}

inline grpc::Status Refusal() {
  const google::rpc::Status details = RefusalDetails();
  return {static_cast<grpc::StatusCode>(details.code()), details.message(),
          details.SerializeAsString()};
}

class FakeDaemon final : public v1::AdminService::Service,
                         public v1::ModelService::Service,
                         public v1::SequenceService::Service,
                         public v1::AttentionService::Service {
 public:
  FakeDaemon() {
    std::string path = (std::filesystem::temp_directory_path() / "spillway-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) std::abort();
    directory_ = path;
    info.set_version("0.1.0");
    info.set_boot_id("b00t");
    info.mutable_limits()->set_message_bytes_max(int64_t{4} << 20);
  }

  ~FakeDaemon() override {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    std::filesystem::remove_all(directory_);
  }

  std::string target() const { return "unix:" + (directory_ / "s").string(); }
  // The address on loopback.
  std::string tcp_target() const { return "127.0.0.1:" + std::to_string(port_); }

  void Start() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(target(), grpc::InsecureServerCredentials());
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(static_cast<v1::AdminService::Service*>(this));
    builder.RegisterService(static_cast<v1::ModelService::Service*>(this));
    builder.RegisterService(static_cast<v1::SequenceService::Service*>(this));
    builder.RegisterService(static_cast<v1::AttentionService::Service*>(this));
    server_ = builder.BuildAndStart();
  }

  // Set before Start.
  v1::GetServerInfoResponse info;
  // Answers of GetStatistics, by page token.
  std::map<std::string, v1::GetStatisticsResponse> statistics_pages;
  // Names of the models on each page of ListModels.
  std::vector<std::vector<std::string>> model_pages;
  // Append refuses the chunk with this index; -1: none.
  int refused_chunk = -1;
  // Largest AppendRequest (serialised) or upload data seen, in bytes.
  std::atomic<size_t> message_bytes_seen = 0;
  std::vector<v1::KvChunk> chunks;
  std::string uploaded;
  int64_t uploaded_total_bytes = 0;
  // Attend waits until its call is cancelled.
  std::atomic<bool> hang = false;
  std::atomic<bool> was_cancelled = false;
  // FetchPages sends this many messages, or stops when its call is cancelled.
  int fetch_messages = 3;
  // Sizes of the output and of the log-sum-exp in each answer of Step.
  size_t answer_bytes = 0;
  size_t lse_bytes = 0;
  // Step answers nothing while this is true, unless its call is cancelled.
  std::atomic<bool> silent = false;
  // Step refuses every other attend, from the first on.
  bool refuses_every_other = false;
  // Streams of Step that were opened, and steps that were begun on them.
  std::atomic<int> stream_count = 0;
  std::atomic<int> begin_count = 0;
  std::atomic<int> fetch_messages_sent = 0;
  // The requests of the last SaveSequence and LoadSequence.
  v1::SaveSequenceRequest saved;
  v1::LoadSequenceRequest loaded;
  // Whether the last of these calls had a deadline within a year.
  bool had_deadline = false;
  // Whether Connect is served. Otherwise the answer is UNIMPLEMENTED.
  bool connects = false;
  // Number of open Connect streams. They end while `disconnect` is true.
  std::atomic<int> connected_count = 0;
  std::atomic<bool> disconnect = false;
  // Client id in the last Connect, and in the metadata of the last GetServerInfo.
  std::string connected_id() const {
    const std::lock_guard lock(ids_mutex_);
    return connected_id_;
  }
  std::string asking_id() const {
    const std::lock_guard lock(ids_mutex_);
    return asking_id_;
  }

 private:
  grpc::Status Connect(grpc::ServerContext* context, const v1::ConnectRequest* request,
                       grpc::ServerWriter<v1::ConnectResponse>*) override {
    if (!connects) return {grpc::StatusCode::UNIMPLEMENTED, ""};
    {
      const std::lock_guard lock(ids_mutex_);
      connected_id_ = request->client_id();
    }
    ++connected_count;
    while (!context->IsCancelled() && !disconnect) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    --connected_count;
    return {grpc::StatusCode::UNAVAILABLE, ""};
  }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    const auto said = context->client_metadata().find("spillway-client");
    if (said != context->client_metadata().end()) {
      const std::lock_guard lock(ids_mutex_);
      asking_id_ = std::string(said->second.data(), said->second.size());
    }
    *response = info;
    return grpc::Status::OK;
  }

  grpc::Status GetStatistics(grpc::ServerContext*, const v1::GetStatisticsRequest* request,
                             v1::GetStatisticsResponse* response) override {
    *response = statistics_pages.at(request->page_token());
    return grpc::Status::OK;
  }

  grpc::Status CreateModel(grpc::ServerContext*, const v1::CreateModelRequest*,
                           v1::CreateModelResponse*) override {
    return Refusal();
  }

  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest* request,
                          v1::ListModelsResponse* response) override {
    const size_t page = request->page_token().empty() ? 0 : std::stoul(request->page_token());
    for (const std::string& name : model_pages.at(page)) response->add_models()->set_name(name);
    if (page + 1 < model_pages.size()) response->set_next_page_token(std::to_string(page + 1));
    return grpc::Status::OK;
  }

  grpc::Status UploadHashWeights(grpc::ServerContext*,
                                 grpc::ServerReader<v1::UploadHashWeightsRequest>* reader,
                                 v1::UploadHashWeightsResponse* response) override {
    v1::UploadHashWeightsRequest request;
    while (reader->Read(&request)) {
      if (!request.name().empty()) response->mutable_model()->set_name(request.name());
      if (request.total_bytes() != 0) uploaded_total_bytes = request.total_bytes();
      message_bytes_seen = std::max(message_bytes_seen.load(), request.data().size());
      uploaded += request.data();
    }
    return grpc::Status::OK;
  }

  grpc::Status SaveSequence(grpc::ServerContext* context, const v1::SaveSequenceRequest* request,
                            v1::SaveSequenceResponse* response) override {
    saved = *request;
    response->set_token_count(7);
    NoteDeadline(*context);
    return grpc::Status::OK;
  }

  grpc::Status LoadSequence(grpc::ServerContext* context, const v1::LoadSequenceRequest* request,
                            v1::LoadSequenceResponse* response) override {
    loaded = *request;
    response->set_client_data(saved.client_data());
    NoteDeadline(*context);
    return grpc::Status::OK;
  }

  void NoteDeadline(const grpc::ServerContext& context) {
    had_deadline =
        context.deadline() < std::chrono::system_clock::now() + std::chrono::hours(24 * 365);
  }

  grpc::Status Append(grpc::ServerContext*, grpc::ServerReader<v1::AppendRequest>* reader,
                      v1::AppendResponse* response) override {
    v1::AppendRequest request;
    while (reader->Read(&request)) {
      if (static_cast<int>(chunks.size()) == refused_chunk) {
        return {grpc::StatusCode::OUT_OF_RANGE, "token_start 7 leaves a gap"};
      }
      message_bytes_seen = std::max(message_bytes_seen.load(), request.ByteSizeLong());
      chunks.push_back(request.chunk());
    }
    response->set_appended_chunk_count(static_cast<int64_t>(chunks.size()));
    return grpc::Status::OK;
  }

  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override {
    while (hang) {
      if (context->IsCancelled()) {
        was_cancelled = true;
        return grpc::Status::CANCELLED;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const v1::AttendItem& item : request->items()) {
      *response->add_results()->mutable_out() = item.q();
    }
    return grpc::Status::OK;
  }

  // Answers attends for one sequence; those at odd layers with an error. Layers 1000 and 1001 end
  // the stream.
  grpc::Status Step(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override {
    ++stream_count;
    v1::StepRequest request;
    while (stream->Read(&request)) {
      begin_count += request.has_begin() ? 1 : 0;
      while (silent && !context->IsCancelled()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      v1::StepResponse response;
      const int layer = request.attend().layer();
      if (layer == 1000) return {grpc::StatusCode::INTERNAL, "broken"};
      if (layer == 1001) return Refusal();
      response.set_layer(layer);
      if (layer % 2 == 1 || (refuses_every_other && ++attend_count_ % 2 == 1)) {
        *response.mutable_status() = RefusalDetails();
      } else {
        response.add_results();
        response.mutable_out()->set_data(std::string(answer_bytes, 'o'));
        response.mutable_lse()->set_data(std::string(lse_bytes, 'l'));
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  grpc::Status FetchPages(grpc::ServerContext* context, const v1::FetchPagesRequest*,
                          grpc::ServerWriter<v1::FetchPagesResponse>* writer) override {
    for (int message = 0; message < fetch_messages; ++message) {
      v1::FetchPagesResponse response;
      response.set_kv_head(message);
      if (!writer->Write(response)) break;
      ++fetch_messages_sent;
    }
    was_cancelled = context->IsCancelled();
    return grpc::Status::OK;
  }

  std::atomic<int> attend_count_ = 0;
  mutable std::mutex ids_mutex_;
  std::string connected_id_;
  std::string asking_id_;
  std::filesystem::path directory_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

// While it lives, http_proxy names a proxy that does not exist.
class DeadProxy {
 public:
  DeadProxy() { setenv("http_proxy", "http://127.0.0.1:1", /*overwrite=*/1); }
  ~DeadProxy() { unsetenv("http_proxy"); }
};

}  // namespace spillway
