#pragma once

#include "daemon/services/context.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace spillway {

class SequenceService final : public v1::SequenceService::CallbackService {
 public:
  explicit SequenceService(const ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* CreateSequence(grpc::CallbackServerContext* context,
                                           const v1::CreateSequenceRequest* request,
                                           v1::CreateSequenceResponse* response) override;
  grpc::ServerUnaryReactor* GetSequence(grpc::CallbackServerContext* context,
                                        const v1::GetSequenceRequest* request,
                                        v1::GetSequenceResponse* response) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response) override;
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context,
                                         const v1::ForkSequenceRequest* request,
                                         v1::ForkSequenceResponse* response) override;
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const v1::TruncateSequenceRequest* request,
                                             v1::TruncateSequenceResponse* response) override;
  grpc::ServerUnaryReactor* DeleteSequence(grpc::CallbackServerContext* context,
                                           const v1::DeleteSequenceRequest* request,
                                           v1::DeleteSequenceResponse* response) override;
  grpc::ServerUnaryReactor* SaveSequence(grpc::CallbackServerContext* context,
                                         const v1::SaveSequenceRequest* request,
                                         v1::SaveSequenceResponse* response) override;
  grpc::ServerUnaryReactor* LoadSequence(grpc::CallbackServerContext* context,
                                         const v1::LoadSequenceRequest* request,
                                         v1::LoadSequenceResponse* response) override;

 private:
  // Answers with what `work`, which waits for files, comes to in a thread of its own.
  template <typename Work>
  grpc::ServerUnaryReactor* AnswerLater(grpc::CallbackServerContext* context, Work work);
  absl::StatusOr<std::shared_ptr<Sequence>> Create(const v1::CreateSequenceRequest& request);

  const ServiceContext& services_;
};

}  // namespace spillway
