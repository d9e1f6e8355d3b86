#include "spillway/client.h"

#include <charconv>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"
#include "spillway/access.h"
#include "spillway/call_context.h"
#include "spillway/error.h"

namespace spillway {
namespace {

// Largest piece of a weights file in one message, bytes (the API's limit).
constexpr size_t kUploadBytesMax = size_t{2} << 20;

// The status of a call of the client that has ended.
absl::Status Ended(const PresenceKeeper& client, const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) client.Reconnect();
  return ToAbslStatus(status);
}

// Makes one unary call of the client. The type of the request follows from the method.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Call(const PresenceKeeper& client, Stub& stub,
                              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                           Response*),
                              const Request& request, absl::Duration default_timeout,
                              const CallOptions& options) {
  CallContext context(options.timeout.value_or(default_timeout), options.stop, client.client_id());
  Response response;
  grpc::Status status = (stub.*method)(context.get(), request, &response);
  if (!status.ok()) return Ended(client, status);
  return response;
}

absl::Status CheckVersion(const v1::GetServerInfoResponse& info) {
  const std::string& version = info.version();
  int major = -1;
  const auto [end, error] = std::from_chars(version.data(), version.data() + version.size(), major);
  if (error == std::errc() && end != version.data() + version.size() && *end == '.' &&
      major == Client::kMajorVersion) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("the daemon has version \"", version,
                                                    "\"; this client speaks major version ",
                                                    Client::kMajorVersion));
}

}  // namespace

Client::Client(std::string target, const ClientOptions& options,
               const std::shared_ptr<grpc::Channel>& channel)
    : target_(std::move(target)),
      options_(options),
      presence_(channel),
      admin_(v1::AdminService::NewStub(channel)),
      models_(v1::ModelService::NewStub(channel)),
      sequences_(v1::SequenceService::NewStub(channel)),
      attention_(v1::AttentionService::NewStub(channel)) {}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, OpenChannel(target, options.access));
  return Connect(std::move(channel), target, options);
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(std::shared_ptr<grpc::Channel> channel,
                                                        const std::string& target,
                                                        const ClientOptions& options) {
  std::unique_ptr<Client> client(new Client(target, options, channel));
  absl::StatusOr<v1::GetServerInfoResponse> info =
      client->GetServerInfo({.timeout = options.connect_timeout});
  if (!info.ok()) {
    // UNAUTHENTICATED is returned unchanged, to keep its reason.
    absl::Status status = info.status();
    if (absl::IsUnauthenticated(status)) return status;
    return absl::Status(status.code(),
                        absl::StrCat("cannot reach spillwayd at ", target, ": ", status.message()));
  }
  if (absl::Status status = CheckVersion(*info); !status.ok()) return status;
  client->server_info_ = *std::move(info);
  return client;
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(const CallOptions& options) {
  return Call(presence_, *admin_, &v1::AdminService::Stub::GetServerInfo,
              v1::GetServerInfoRequest(), options_.call_timeout, options);
}

absl::StatusOr<v1::GetStatisticsResponse> Client::GetStatistics(const std::string& model,
                                                                const CallOptions& options) {
  v1::GetStatisticsRequest request;
  request.set_model(model);
  absl::StatusOr<v1::GetStatisticsResponse> all;
  do {
    auto page = Call(presence_, *admin_, &v1::AdminService::Stub::GetStatistics, request,
                     options_.call_timeout, options);
    if (!page.ok()) return page.status();
    request.set_page_token(page->next_page_token());
    page->clear_next_page_token();
    if (!all.ok()) {
      all = *std::move(page);
      continue;
    }
    // If a model is given, every page repeats it.
    if (model.empty()) all->mutable_models()->MergeFrom(page->models());
    all->mutable_sequences()->MergeFrom(page->sequences());
  } while (!request.page_token().empty());
  return all;
}

absl::StatusOr<std::vector<v1::MetricFamily>> Client::GetMetrics(const CallOptions& options) {
  v1::GetStatisticsRequest request;
  request.set_page_size(1);  // models; they are not used
  request.set_include_metrics(true);
  auto response = Call(presence_, *admin_, &v1::AdminService::Stub::GetStatistics, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::vector<v1::MetricFamily>(
      std::make_move_iterator(response->mutable_metrics()->begin()),
      std::make_move_iterator(response->mutable_metrics()->end()));
}

absl::StatusOr<v1::Model> Client::CreateModel(const std::string& id, const v1::Model& model,
                                              const CallOptions& options) {
  v1::CreateModelRequest request;
  request.set_model_id(id);
  *request.mutable_model() = model;
  auto response = Call(presence_, *models_, &v1::ModelService::Stub::CreateModel, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_model());
}

absl::StatusOr<v1::Model> Client::GetModel(const std::string& name, const CallOptions& options) {
  v1::GetModelRequest request;
  request.set_name(name);
  auto response = Call(presence_, *models_, &v1::ModelService::Stub::GetModel, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_model());
}

absl::StatusOr<std::vector<v1::Model>> Client::ListModels(const CallOptions& options) {
  std::vector<v1::Model> models;
  v1::ListModelsRequest request;
  do {
    auto response = Call(presence_, *models_, &v1::ModelService::Stub::ListModels, request,
                         options_.call_timeout, options);
    if (!response.ok()) return response.status();
    std::move(response->mutable_models()->begin(), response->mutable_models()->end(),
              std::back_inserter(models));
    request.set_page_token(response->next_page_token());
  } while (!request.page_token().empty());
  return models;
}

absl::Status Client::DeleteModel(const std::string& name, const CallOptions& options) {
  v1::DeleteModelRequest request;
  request.set_name(name);
  return Call(presence_, *models_, &v1::ModelService::Stub::DeleteModel, request,
              options_.call_timeout, options)
      .status();
}

absl::StatusOr<v1::Model> Client::UploadHashWeights(const std::string& name, std::string_view file,
                                                    const CallOptions& options) {
  CallContext context(options.timeout.value_or(absl::InfiniteDuration()), options.stop,
                      presence_.client_id());
  v1::UploadHashWeightsResponse response;
  auto writer = models_->UploadHashWeights(context.get(), &response);
  v1::UploadHashWeightsRequest request;
  request.set_name(name);
  request.set_total_bytes(static_cast<int64_t>(file.size()));
  // A refused upload ends the stream early; Finish then has the reason.
  for (bool open = true; open && !file.empty(); request.Clear()) {
    const std::string_view piece = file.substr(0, kUploadBytesMax);
    request.set_data(piece.data(), piece.size());
    open = writer->Write(request);
    file.remove_prefix(piece.size());
  }
  writer->WritesDone();
  grpc::Status status = writer->Finish();
  if (!status.ok()) return Ended(presence_, status);
  return std::move(*response.mutable_model());
}

absl::StatusOr<v1::Sequence> Client::CreateSequence(const std::string& id,
                                                    const v1::Sequence& sequence,
                                                    const CallOptions& options) {
  v1::CreateSequenceRequest request;
  request.set_sequence_id(id);
  *request.mutable_sequence() = sequence;
  auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::CreateSequence, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::StatusOr<v1::Sequence> Client::GetSequence(const std::string& name,
                                                 const CallOptions& options) {
  v1::GetSequenceRequest request;
  request.set_name(name);
  auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::GetSequence, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::StatusOr<std::vector<v1::Sequence>> Client::ListSequences(const std::string& model,
                                                                const CallOptions& options) {
  std::vector<v1::Sequence> sequences;
  v1::ListSequencesRequest request;
  request.set_model(model);
  do {
    auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::ListSequences, request,
                         options_.call_timeout, options);
    if (!response.ok()) return response.status();
    std::move(response->mutable_sequences()->begin(), response->mutable_sequences()->end(),
              std::back_inserter(sequences));
    request.set_page_token(response->next_page_token());
  } while (!request.page_token().empty());
  return sequences;
}

absl::StatusOr<v1::Sequence> Client::ForkSequence(const std::string& name, const std::string& id,
                                                  const CallOptions& options) {
  v1::ForkSequenceRequest request;
  request.set_name(name);
  request.set_sequence_id(id);
  auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::ForkSequence, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::StatusOr<v1::Sequence> Client::TruncateSequence(const std::string& name, int64_t token_count,
                                                      const CallOptions& options) {
  v1::TruncateSequenceRequest request;
  request.set_name(name);
  request.set_token_count(token_count);
  auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::TruncateSequence,
                       request, options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::StatusOr<v1::SaveSequenceResponse> Client::SaveSequence(const std::string& name,
                                                              const std::string& folder,
                                                              const std::string& client_data,
                                                              const CallOptions& options) {
  v1::SaveSequenceRequest request;
  request.set_name(name);
  request.set_folder(folder);
  request.set_client_data(client_data);
  return Call(presence_, *sequences_, &v1::SequenceService::Stub::SaveSequence, request,
              absl::InfiniteDuration(), options);
}

absl::StatusOr<v1::LoadSequenceResponse> Client::LoadSequence(const std::string& folder,
                                                              const std::string& id,
                                                              const v1::Sequence& sequence,
                                                              const CallOptions& options) {
  v1::LoadSequenceRequest request;
  request.set_folder(folder);
  request.set_sequence_id(id);
  *request.mutable_sequence() = sequence;
  return Call(presence_, *sequences_, &v1::SequenceService::Stub::LoadSequence, request,
              absl::InfiniteDuration(), options);
}

absl::Status Client::DeleteSnapshot(const std::string& folder, const CallOptions& options) {
  v1::DeleteSnapshotRequest request;
  request.set_folder(folder);
  return Call(presence_, *sequences_, &v1::SequenceService::Stub::DeleteSnapshot, request,
              options_.call_timeout, options)
      .status();
}

absl::StatusOr<v1::Sequence> Client::SealSequence(const std::string& name, bool sealed,
                                                  const CallOptions& options) {
  v1::SealSequenceRequest request;
  request.set_name(name);
  request.set_sealed(sealed);
  auto response = Call(presence_, *sequences_, &v1::SequenceService::Stub::SealSequence, request,
                       options_.call_timeout, options);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::Status Client::DeleteSequence(const std::string& name, const CallOptions& options) {
  v1::DeleteSequenceRequest request;
  request.set_name(name);
  return Call(presence_, *sequences_, &v1::SequenceService::Stub::DeleteSequence, request,
              options_.call_timeout, options)
      .status();
}

absl::Status Client::DeleteSealedSequence(const std::string& name, const CallOptions& options) {
  v1::DeleteSequenceRequest request;
  request.set_name(name);
  request.set_if_sealed(true);
  return Call(presence_, *sequences_, &v1::SequenceService::Stub::DeleteSequence, request,
              options_.call_timeout, options)
      .status();
}

absl::StatusOr<v1::AppendResponse> Client::Append(const KvRows& rows, const CallOptions& options) {
  absl::StatusOr<KvChunker> chunker =
      KvChunker::Create(rows, server_info_.limits().message_bytes_max());
  if (!chunker.ok()) return chunker.status();
  CallContext context(options.timeout.value_or(absl::InfiniteDuration()), options.stop,
                      presence_.client_id());
  v1::AppendResponse response;
  auto writer = attention_->Append(context.get(), &response);
  v1::AppendRequest request;
  // A refused chunk ends the stream early; Finish then has the reason.
  while (chunker->Next(*request.mutable_chunk()) && writer->Write(request)) {
  }
  writer->WritesDone();
  grpc::Status status = writer->Finish();
  if (!status.ok()) return Ended(presence_, status);
  return response;
}

absl::StatusOr<v1::AttendResponse> Client::Attend(const v1::AttendRequest& request,
                                                  const CallOptions& options) {
  return Call(presence_, *attention_, &v1::AttentionService::Stub::Attend, request,
              options_.call_timeout, options);
}

std::unique_ptr<StepStream> Client::OpenSteps(const CallOptions& options) {
  return std::make_unique<StepStream>(
      std::make_unique<CallContext>(options.timeout.value_or(absl::InfiniteDuration()),
                                    options.stop, presence_.client_id()),
      *attention_);
}

absl::StatusOr<v1::SelectResponse> Client::Select(const v1::SelectRequest& request,
                                                  const CallOptions& options) {
  return Call(presence_, *attention_, &v1::AttentionService::Stub::Select, request,
              options_.call_timeout, options);
}

absl::Status Client::FetchPages(const v1::FetchPagesRequest& request,
                                absl::FunctionRef<absl::Status(v1::FetchPagesResponse)> on_rows,
                                const CallOptions& options) {
  CallContext context(options.timeout.value_or(absl::InfiniteDuration()), options.stop,
                      presence_.client_id());
  auto reader = attention_->FetchPages(context.get(), request);
  v1::FetchPagesResponse response;
  while (reader->Read(&response)) {
    if (absl::Status status = on_rows(std::move(response)); !status.ok()) {
      context.get()->TryCancel();
      reader->Finish();
      return status;
    }
  }
  return Ended(presence_, reader->Finish());
}

}  // namespace spillway
