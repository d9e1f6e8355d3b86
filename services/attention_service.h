#pragma once

#include "services/service.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// Appends and attends. Each RPC has its own file in this folder.
class AttentionService final : public Service {
 public:
  explicit AttentionService(const ServiceContext& services);

 private:
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context, const Caller& caller,
                                   const v1::AttendRequest* request, v1::AttendResponse* response);
  grpc::ServerUnaryReactor* Select(grpc::CallbackServerContext* context, const Caller& caller,
                                   const v1::SelectRequest* request, v1::SelectResponse* response);
};

}  // namespace spillway
