#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "engine/caller.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/impl/codegen/server_callback_handlers.h"
#include "grpcpp/impl/rpc_service_method.h"
#include "grpcpp/impl/service_type.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "services/call.h"
#include "services/received.h"
#include "services/request_handler.h"

namespace spillway {

// A gRPC service that checks callers when their calls arrive, and charges and parses requests.
// Streams of messages get their messages as bytes. Methods have their full names, such as
// "/spillway.v1.ModelService/GetModel".
class Service : public grpc::Service {
 protected:
  explicit Service(const ServiceContext& services) : services_(services) {}

  // Who may call a method, and when.
  enum class Access {
    kWork,           // a draining daemon refuses it
    kWhileDraining,  // also in a draining daemon
    kPublic,         // the same, and no token is needed
  };

  template <typename Self, typename Request, typename Response>
  void Unary(const char* name,
             grpc::ServerUnaryReactor* (Self::*handler)(grpc::CallbackServerContext*, const Caller&,
                                                        const Request*, Response*),
             Access access = Access::kWork) {
    using Handler = grpc::internal::CallbackUnaryHandler<Received<Request>, Response>;
    AddOneRequest<Request>(
        name, access, /*is_unary=*/true,
        std::make_unique<Handler>([this, handler, access](grpc::CallbackServerContext* context,
                                                          const Received<Request>* received,
                                                          Response* response) {
          const absl::StatusOr<const Request*> request = Open(received, access);
          if (!request.ok()) return Answer(services_, context, request.status());
          return (static_cast<Self*>(this)->*handler)(context, *received->caller(), *request,
                                                      response);
        }));
  }

  // One request that is answered by a stream.
  template <typename Request, typename Response>
  void ServerStream(
      const char* name,
      std::function<grpc::ServerWriteReactor<Response>*(grpc::CallbackServerContext*, const Caller&,
                                                        absl::StatusOr<const Request*>)>
          open,
      Access access = Access::kWork) {
    using Handler = grpc::internal::CallbackServerStreamingHandler<Received<Request>, Response>;
    using Reactor = grpc::ServerWriteReactor<Response>;
    AddOneRequest<Request>(
        name, access, /*is_unary=*/false,
        std::make_unique<Handler>(
            [this, open = std::move(open), access](grpc::CallbackServerContext* context,
                                                   const Received<Request>* received) -> Reactor* {
              const absl::StatusOr<const Request*> request = Open(received, access);
              if (!received->caller().ok()) return Refuse<Reactor>(*context, request.status());
              return open(context, *received->caller(), request);
            }));
  }

  template <typename Response>
  void ClientStream(const char* name, std::function<grpc::ServerReadReactor<grpc::ByteBuffer>*(
                                          grpc::CallbackServerContext*, const Caller&, Response*)>
                                          open) {
    using Handler = grpc::internal::CallbackClientStreamingHandler<grpc::ByteBuffer, Response>;
    using Reactor = grpc::ServerReadReactor<grpc::ByteBuffer>;
    services_.calls.Add(name);
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
    services_.calls.Add(name, /*is_work=*/true, /*counts_itself=*/true);
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
  // The caller of a stream of work, if the call is accepted.
  absl::StatusOr<Caller> LetIn(const grpc::CallbackServerContext& context) {
    absl::StatusOr<Caller> caller = CallerOf(services_, context);
    if (!caller.ok()) return caller;
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

  // The request, if the call is accepted. gRPC passes requests to handlers as const, but only the
  // handler uses them.
  template <typename Request>
  absl::StatusOr<const Request*> Open(const Received<Request>* received, Access access) {
    if (!received->caller().ok()) return received->caller().status();
    if (access == Access::kWork) {
      if (absl::Status status = services_.drain.CheckNewWork(); !status.ok()) return status;
    }
    return const_cast<Received<Request>*>(received)->Open(services_.engine.budget());
  }

  // handler: of Received<Request>.
  template <typename Request>
  void AddOneRequest(const char* name, Access access, bool is_unary,
                     std::unique_ptr<grpc::internal::MethodHandler> handler) {
    MethodCounters& counters = services_.calls.Add(name, access == Access::kWork);
    const bool is_public = access == Access::kPublic;
    // A stream of requests to gRPC: see RequestHandler.
    Add(name, grpc::internal::RpcMethod::BIDI_STREAMING,
        new RequestHandler<Request>(
            std::move(handler),
            [this,
             is_public](const grpc::CallbackServerContext& context) -> absl::StatusOr<Caller> {
              if (is_public) return Caller();
              return CallerOf(services_, context);
            },
            is_public ? services_.public_waiting : services_.waiting,
            is_unary ? &counters.open_count : nullptr));
  }

  void Add(const char* name, grpc::internal::RpcMethod::RpcType type,
           grpc::internal::MethodHandler* handler) {
    AddMethod(new grpc::internal::RpcServiceMethod(name, type, nullptr));
    MarkMethodCallback(method_count_++, handler);
  }

  int method_count_ = 0;
};

}  // namespace spillway
