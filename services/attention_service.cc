#include "services/attention_service.h"

#include "services/append_stream.h"
#include "services/attend_call.h"
#include "services/fetch_stream.h"
#include "services/step_call.h"

namespace spillway {

AttentionService::AttentionService(const ServiceContext& services) : Service(services) {
  Unary("/spillway.v1.AttentionService/Attend", &AttentionService::Attend);
  Unary("/spillway.v1.AttentionService/Select", &AttentionService::Select);
  ClientStream<v1::AppendResponse>("/spillway.v1.AttentionService/Append",
                                   [this](grpc::CallbackServerContext* context,
                                          const Caller& caller, v1::AppendResponse* response) {
                                     return new AppendStream(services_, *context, caller, response);
                                   });
  BidiStream<v1::StepResponse>("/spillway.v1.AttentionService/Step",
                               [this](grpc::CallbackServerContext* context, const Caller& caller) {
                                 return new StepCall(services_, *context, caller);
                               });
  ServerStream<v1::FetchPagesRequest, v1::FetchPagesResponse>(
      "/spillway.v1.AttentionService/FetchPages",
      [this](grpc::CallbackServerContext* context, const Caller& caller,
             const absl::StatusOr<const v1::FetchPagesRequest*>& request) {
        return new FetchStream(services_, *context, caller, request);
      });
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const Caller& caller,
                                                   const v1::AttendRequest* request,
                                                   v1::AttendResponse* response) {
  return StartAttend(services_, *context, caller, *request, response);
}

grpc::ServerUnaryReactor* AttentionService::Select(grpc::CallbackServerContext* context,
                                                   const Caller& caller,
                                                   const v1::SelectRequest* request,
                                                   v1::SelectResponse* response) {
  return StartSelect(services_, *context, caller, *request, response);
}

}  // namespace spillway
