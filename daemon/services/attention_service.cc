#include "daemon/services/attention_service.h"

#include "daemon/services/append_stream.h"
#include "daemon/services/attend_call.h"
#include "daemon/services/decode_stream.h"
#include "daemon/services/fetch_stream.h"

namespace spillway {

grpc::ServerReadReactor<v1::AppendRequest>* AttentionService::Append(
    grpc::CallbackServerContext* context, v1::AppendResponse* response) {
  return new AppendStream(services_, *context, response);
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const v1::AttendRequest* request,
                                                   v1::AttendResponse* response) {
  return StartAttend(services_, *context, *request, response);
}

grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* AttentionService::Decode(
    grpc::CallbackServerContext* context) {
  return new DecodeStream(services_, *context);
}

grpc::ServerUnaryReactor* AttentionService::Select(grpc::CallbackServerContext* context,
                                                   const v1::SelectRequest* request,
                                                   v1::SelectResponse* response) {
  return StartSelect(services_, *context, *request, response);
}

grpc::ServerWriteReactor<v1::FetchPagesResponse>* AttentionService::FetchPages(
    grpc::CallbackServerContext* context, const v1::FetchPagesRequest* request) {
  return new FetchStream(services_, *context, *request);
}

}  // namespace spillway
