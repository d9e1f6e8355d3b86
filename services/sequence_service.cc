#include "services/sequence_service.h"

#include <utility>

#include "host/base/status_macros.h"
#include "services/call.h"
#include "services/connect_stream.h"
#include "services/convert/lookup.h"
#include "services/convert/model.h"
#include "services/convert/policy.h"
#include "services/fill_page.h"
#include "services/snapshots.h"

namespace spillway {

SequenceService::SequenceService(const ServiceContext& services) : Service(services) {
  Unary("/spillway.v1.SequenceService/CreateSequence", &SequenceService::CreateSequence);
  Unary("/spillway.v1.SequenceService/GetSequence", &SequenceService::GetSequence);
  Unary("/spillway.v1.SequenceService/ListSequences", &SequenceService::ListSequences);
  Unary("/spillway.v1.SequenceService/ForkSequence", &SequenceService::ForkSequence);
  Unary("/spillway.v1.SequenceService/TruncateSequence", &SequenceService::TruncateSequence);
  Unary("/spillway.v1.SequenceService/SealSequence", &SequenceService::SealSequence);
  Unary("/spillway.v1.SequenceService/DeleteSequence", &SequenceService::DeleteSequence);
  Unary("/spillway.v1.SequenceService/SaveSequence", &SequenceService::SaveSequence);
  Unary("/spillway.v1.SequenceService/LoadSequence", &SequenceService::LoadSequence);
  Unary("/spillway.v1.SequenceService/DeleteSnapshot", &SequenceService::DeleteSnapshot);
  ServerStream<v1::ConnectRequest, v1::ConnectResponse>(
      "/spillway.v1.SequenceService/Connect",
      [this](grpc::CallbackServerContext*, const Caller& caller,
             const absl::StatusOr<const v1::ConnectRequest*>& request) {
        return new ConnectStream(services_, caller, request);
      });
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceService::Create(
    const Caller& caller, const v1::CreateSequenceRequest& request) {
  const v1::Sequence& asked = request.sequence();
  ASSIGN_OR_RETURN(const std::string id, ChooseId(request.sequence_id(), "sequence_id"));
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                   FindModel(services_.engine, caller, asked.model(), "sequence.model"));
  ASSIGN_OR_RETURN(const absl::Duration ttl, TtlFromProto(asked, services_.limits.ttl_default()));
  ASSIGN_OR_RETURN(const Policy policy,
                   ApplyPolicy(asked.policy(), model->policy, model->spec, "sequence.policy."));
  return services_.engine.CreateSequence(caller.IdOf(id), model, policy, ttl,
                                         OriginOf(caller, request.sequence_id()));
}

grpc::ServerUnaryReactor* SequenceService::CreateSequence(grpc::CallbackServerContext* context,
                                                          const Caller& caller,
                                                          const v1::CreateSequenceRequest* request,
                                                          v1::CreateSequenceResponse* response) {
  const absl::StatusOr<std::shared_ptr<Sequence>> sequence = Create(caller, *request);
  if (sequence.ok()) *response->mutable_sequence() = ToProto(**sequence);
  return Answer(services_, context, sequence.status());
}

grpc::ServerUnaryReactor* SequenceService::GetSequence(grpc::CallbackServerContext* context,
                                                       const Caller& caller,
                                                       const v1::GetSequenceRequest* request,
                                                       v1::GetSequenceResponse* response) {
  const absl::StatusOr<std::shared_ptr<Sequence>> sequence =
      FindSequence(services_.engine, caller, request->name(), "name");
  if (sequence.ok()) *response->mutable_sequence() = ToProto(**sequence);
  return Answer(services_, context, sequence.status());
}

grpc::ServerUnaryReactor* SequenceService::ListSequences(grpc::CallbackServerContext* context,
                                                         const Caller& caller,
                                                         const v1::ListSequencesRequest* request,
                                                         v1::ListSequencesResponse* response) {
  const absl::StatusOr<PageRequest> page = ParsePage(request->page_size(), request->page_token());
  if (!page.ok()) return Answer(services_, context, page.status());
  std::shared_ptr<Model> model;
  if (!request->model().empty()) {
    absl::StatusOr<std::shared_ptr<Model>> found =
        FindModel(services_.engine, caller, request->model(), "model");
    if (!found.ok()) return Answer(services_, context, found.status());
    model = *std::move(found);
  }
  const Page<Sequence> sequences = services_.engine.registry().ListSequencesOf(
      caller.name_space(), model.get(), page->after, page->size);
  response->set_next_page_token(
      FillPage(sequences, *response->mutable_sequences(),
               [](const Sequence& sequence) { return ToProto(sequence); }));
  return Answer(services_, context, absl::OkStatus());
}

grpc::ServerUnaryReactor* SequenceService::ForkSequence(grpc::CallbackServerContext* context,
                                                        const Caller& caller,
                                                        const v1::ForkSequenceRequest* request,
                                                        v1::ForkSequenceResponse* response) {
  absl::StatusOr<std::shared_ptr<Sequence>> source =
      FindSequence(services_.engine, caller, request->name(), "name");
  if (!source.ok()) return Answer(services_, context, source.status());
  const absl::StatusOr<std::string> id = ChooseId(request->sequence_id(), "sequence_id");
  if (!id.ok()) return Answer(services_, context, id.status());
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  services_.engine.Fork(
      *std::move(source), caller.IdOf(*id),
      [call, response](absl::StatusOr<std::shared_ptr<Sequence>> copy) {
        if (copy.ok()) *response->mutable_sequence() = ToProto(**copy);
        call->End(copy.status());
      },
      OriginOf(caller, request->sequence_id()));
  return reactor;
}

grpc::ServerUnaryReactor* SequenceService::TruncateSequence(
    grpc::CallbackServerContext* context, const Caller& caller,
    const v1::TruncateSequenceRequest* request, v1::TruncateSequenceResponse* response) {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence =
      FindSequence(services_.engine, caller, request->name(), "name");
  if (!sequence.ok()) return Answer(services_, context, sequence.status());
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  services_.engine.Truncate(*sequence, request->token_count(),
                            [call, response, sequence = *sequence](const absl::Status& status) {
                              if (status.ok()) *response->mutable_sequence() = ToProto(*sequence);
                              call->End(status);
                            });
  return reactor;
}

grpc::ServerUnaryReactor* SequenceService::SealSequence(grpc::CallbackServerContext* context,
                                                        const Caller& caller,
                                                        const v1::SealSequenceRequest* request,
                                                        v1::SealSequenceResponse* response) {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence =
      FindSequence(services_.engine, caller, request->name(), "name");
  if (!sequence.ok()) return Answer(services_, context, sequence.status());
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  services_.engine.Seal(*sequence, request->sealed(),
                        [call, response, sequence = *sequence](const absl::Status& status) {
                          if (status.ok()) *response->mutable_sequence() = ToProto(*sequence);
                          call->End(status);
                        });
  return reactor;
}

grpc::ServerUnaryReactor* SequenceService::DeleteSequence(grpc::CallbackServerContext* context,
                                                          const Caller& caller,
                                                          const v1::DeleteSequenceRequest* request,
                                                          v1::DeleteSequenceResponse*) {
  const absl::StatusOr<std::string> id = ParseName(request->name(), "sequences", "name");
  if (!id.ok()) return Answer(services_, context, id.status());
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  const auto done = [call](const absl::Status& status) { call->End(status); };
  if (request->if_sealed()) {
    services_.engine.DeleteSealed(caller.IdOf(*id), done);
  } else {
    services_.engine.Delete(caller.IdOf(*id), done);
  }
  return reactor;
}

template <typename Work>
grpc::ServerUnaryReactor* SequenceService::AnswerLater(grpc::CallbackServerContext* context,
                                                       Work work) {
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  const absl::Status status =
      services_.file_threads.Run([call, work] { call->End(work(call->cancel())); });
  if (!status.ok()) call->End(status);
  return reactor;
}

grpc::ServerUnaryReactor* SequenceService::SaveSequence(grpc::CallbackServerContext* context,
                                                        const Caller& caller,
                                                        const v1::SaveSequenceRequest* request,
                                                        v1::SaveSequenceResponse* response) {
  return AnswerLater(context, [this, caller, request, response](const auto& cancel) {
    return spillway::SaveSequence(services_, caller, *request, cancel, *response);
  });
}

grpc::ServerUnaryReactor* SequenceService::LoadSequence(grpc::CallbackServerContext* context,
                                                        const Caller& caller,
                                                        const v1::LoadSequenceRequest* request,
                                                        v1::LoadSequenceResponse* response) {
  return AnswerLater(context, [this, caller, request, response](const auto& cancel) {
    return spillway::LoadSequence(services_, caller, *request, cancel, *response);
  });
}

grpc::ServerUnaryReactor* SequenceService::DeleteSnapshot(grpc::CallbackServerContext* context,
                                                          const Caller& caller,
                                                          const v1::DeleteSnapshotRequest* request,
                                                          v1::DeleteSnapshotResponse*) {
  return AnswerLater(context, [this, caller, request](const auto&) {
    return spillway::DeleteSnapshot(services_, caller, *request);
  });
}

}  // namespace spillway
