#pragma once

#include "daemon/services/context.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway {

// Appends and attends; each RPC is a file of its own beside this one.
class AttentionService final : public v1::AttentionService::CallbackService {
 public:
  explicit AttentionService(const ServiceContext& services) : services_(services) {}

  grpc::ServerReadReactor<v1::AppendRequest>* Append(grpc::CallbackServerContext* context,
                                                     v1::AppendResponse* response) override;
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const v1::AttendRequest* request,
                                   v1::AttendResponse* response) override;
  grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* Decode(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Select(grpc::CallbackServerContext* context,
                                   const v1::SelectRequest* request,
                                   v1::SelectResponse* response) override;
  grpc::ServerWriteReactor<v1::FetchPagesResponse>* FetchPages(
      grpc::CallbackServerContext* context, const v1::FetchPagesRequest* request) override;

 private:
  const ServiceContext& services_;
};

}  // namespace spillway
