#pragma once

#include <functional>

#include "daemon/engine/caller.h"
#include "daemon/services/call.h"
#include "daemon/services/received.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/impl/codegen/server_callback_handlers.h"
#include "grpcpp/impl/rpc_service_method.h"
#include "grpcpp/impl/service_type.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"

namespace spillway {

// A gRPC service that checks callers, and charges and parses requests. Streams of messages get
// their messages as bytes. Methods have their full names, such as
// "/spillway.v1.ModelService/GetModel".
class Service : public grpc::Service {
 protected:
  explicit Service(const ServiceContext& services) : services_(services) {}

  // is_work: a draining daemon refuses the method.
  template <typename Self, typename Request, typename Response>
  void Unary(const char* name,
             grpc::ServerUnaryReactor* (Self::*handler)(grpc::CallbackServerContext*, const Caller&,
                                                        const Request*, Response*),
             bool is_work = true) {
    using Handler = grpc::internal::CallbackUnaryHandler<Received<Request>, Response>;
    Add(name, grpc::internal::RpcMethod::NORMAL_RPC,
        new Handler([this, handler, is_work](grpc::CallbackServerContext* context,
                                             const Received<Request>* received,
                                             Response* response) {
          const absl::StatusOr<Caller> caller = LetIn(*context, is_work);
          if (!caller.ok()) return Answer(services_, context, caller.status());
          const absl::StatusOr<const Request*> request = Open(received);
          if (!request.ok()) return Answer(services_, context, request.status());
          return (static_cast<Self*>(this)->*handler)(context, *caller, *request, response);
        }),
        is_work);
  }

  // One request that is answered by a stream.
  template <typename Request, typename Response>
  void ServerStream(
      const char* name,
      std::function<grpc::ServerWriteReactor<Response>*(grpc::CallbackServerContext*, const Caller&,
                                                        absl::StatusOr<const Request*>)>
          open) {
    using Handler = grpc::internal::CallbackServerStreamingHandler<Received<Request>, Response>;
    Add(name, grpc::internal::RpcMethod::SERVER_STREAMING,
        new Handler([this, open = std::move(open)](
                        grpc::CallbackServerContext* context,
                        const Received<Request>* received) -> grpc::ServerWriteReactor<Response>* {
          const absl::StatusOr<Caller> caller = LetIn(*context);
          if (!caller.ok())
            return Refuse<grpc::ServerWriteReactor<Response>>(*context, caller.status());
          return open(context, *caller, Open(received));
        }));
  }

  template <typename Response>
  void ClientStream(const char* name, std::function<grpc::ServerReadReactor<grpc::ByteBuffer>*(
                                          grpc::CallbackServerContext*, const Caller&, Response*)>
                                          open) {
    using Handler = grpc::internal::CallbackClientStreamingHandler<grpc::ByteBuffer, Response>;
    using Reactor = grpc::ServerReadReactor<grpc::ByteBuffer>;
    Add(name, grpc::internal::RpcMethod::CLIENT_STREAMING,
        new Handler([this, open = std::move(open)](grpc::CallbackServerContext* context,
                                                   Response* response) -> Reactor* {
          const absl::StatusOr<Caller> caller = LetIn(*context);
          if (!caller.ok()) return Refuse<Reactor>(*context, caller.status());
          return open(context, *caller, response);
        }));
  }

  template <typename Response>
  void BidiStream(const char* name,
                  std::function<grpc::ServerBidiReactor<grpc::ByteBuffer, Response>*(
                      grpc::CallbackServerContext*, const Caller&)>
                      open) {
    using Handler = grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, Response>;
    using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, Response>;
    Add(name, grpc::internal::RpcMethod::BIDI_STREAMING,
        new Handler(
            [this, open = std::move(open)](grpc::CallbackServerContext* context) -> Reactor* {
              const absl::StatusOr<Caller> caller = LetIn(*context);
              if (!caller.ok()) return Refuse<Reactor>(*context, caller.status());
              return open(context, *caller);
            }));
  }

  const ServiceContext& services_;

 private:
  // The caller, if the call is accepted.
  absl::StatusOr<Caller> LetIn(const grpc::CallbackServerContext& context, bool is_work = true) {
    absl::StatusOr<Caller> caller = CallerOf(services_, context);
    if (!caller.ok() || !is_work) return caller;
    if (absl::Status status = services_.drain.CheckNewWork(); !status.ok()) return status;
    return caller;
  }

  // A stream that ends at once with `status`.
  template <typename Reactor>
  Reactor* Refuse(const grpc::CallbackServerContext& context, const absl::Status& status) {
    class Refused final : public Reactor {
     public:
      explicit Refused(const grpc::Status& status) { this->Finish(status); }
      void OnDone() override { delete this; }
    };
    return new Refused(services_.status.ToGrpc(status, TraceOf(context)));
  }

  // gRPC passes requests to handlers as const, but only the handler uses them.
  template <typename Request>
  absl::StatusOr<const Request*> Open(const Received<Request>* received) {
    return const_cast<Received<Request>*>(received)->Open(services_.engine.budget());
  }

  void Add(const char* name, grpc::internal::RpcMethod::RpcType type,
           grpc::internal::MethodHandler* handler, bool is_work = true) {
    services_.calls.Add(name, is_work);
    AddMethod(new grpc::internal::RpcServiceMethod(name, type, nullptr));
    MarkMethodCallback(method_count_++, handler);
  }

  int method_count_ = 0;
};

}  // namespace spillway
