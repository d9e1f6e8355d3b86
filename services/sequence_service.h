#pragma once

#include "services/service.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway {

class SequenceService final : public Service {
 public:
  explicit SequenceService(const ServiceContext& services);

 private:
  grpc::ServerUnaryReactor* CreateSequence(grpc::CallbackServerContext* context,
                                           const Caller& caller,
                                           const v1::CreateSequenceRequest* request,
                                           v1::CreateSequenceResponse* response);
  grpc::ServerUnaryReactor* GetSequence(grpc::CallbackServerContext* context, const Caller& caller,
                                        const v1::GetSequenceRequest* request,
                                        v1::GetSequenceResponse* response);
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const Caller& caller,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response);
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::ForkSequenceRequest* request,
                                         v1::ForkSequenceResponse* response);
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const Caller& caller,
                                             const v1::TruncateSequenceRequest* request,
                                             v1::TruncateSequenceResponse* response);
  grpc::ServerUnaryReactor* SealSequence(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::SealSequenceRequest* request,
                                         v1::SealSequenceResponse* response);
  grpc::ServerUnaryReactor* DeleteSequence(grpc::CallbackServerContext* context,
                                           const Caller& caller,
                                           const v1::DeleteSequenceRequest* request,
                                           v1::DeleteSequenceResponse* response);
  grpc::ServerUnaryReactor* SaveSequence(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::SaveSequenceRequest* request,
                                         v1::SaveSequenceResponse* response);
  grpc::ServerUnaryReactor* LoadSequence(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::LoadSequenceRequest* request,
                                         v1::LoadSequenceResponse* response);
  grpc::ServerUnaryReactor* DeleteSnapshot(grpc::CallbackServerContext* context,
                                           const Caller& caller,
                                           const v1::DeleteSnapshotRequest* request,
                                           v1::DeleteSnapshotResponse* response);

  // Runs `work`, which waits for files, in its own thread, and answers with its result.
  template <typename Work>
  grpc::ServerUnaryReactor* AnswerLater(grpc::CallbackServerContext* context, Work work);
  absl::StatusOr<std::shared_ptr<Sequence>> Create(const Caller& caller,
                                                   const v1::CreateSequenceRequest& request);
};

}  // namespace spillway
