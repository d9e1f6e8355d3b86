#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/caller.h"
#include "daemon/services/context.h"
#include "grpcpp/grpcpp.h"
#include "host/device/cancel.h"

namespace spillway {

// Metadata by which a call says which client it is of; who does not is taken for one that never
// goes.
inline constexpr char kClientMetadata[] = "spillway-client";

// Whose the call is, and of which client. UNAUTHENTICATED where tokens are asked for and it brings
// none that is good, INVALID_ARGUMENT for an id that is none.
absl::StatusOr<Caller> CallerOf(const ServiceContext& services,
                                const grpc::CallbackServerContext& context);

// By what the client's tracing knows the call: the id of the trace that its `traceparent` names, or
// else its `x-request-id`; empty where it has neither, or none that is valid, or several.
std::string TraceOf(const grpc::CallbackServerContext& context);

// The client that the caller says it is. INVALID_ARGUMENT names the field.
absl::StatusOr<std::shared_ptr<Presence>> ClientOf(const ServiceContext& services,
                                                   const Caller& caller, std::string_view id,
                                                   const std::string& field);

// Stops with the call's deadline.
std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context);

// A unary call that is answered later, through gRPC's own reactor: one of ours
// would have a thread woken beside every answer, to be told of its end.
class UnaryCall {
 public:
  UnaryCall(const ServiceContext& services, grpc::CallbackServerContext& context);
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  // What the handler returns; asked before the call may end.
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  // Stops with the call and its deadline; not to be looked at after End.
  const std::shared_ptr<CancelToken>& cancel() const { return cancel_; }
  // Answers, and deletes this. Called once, from any thread.
  void End(const absl::Status& status) {
    End(services_.status.ToGrpc(status, status.ok() ? std::string() : TraceOf(context_)));
  }
  void End(const grpc::Status& status);

 protected:
  const ServiceContext& services_;

 private:
  const grpc::CallbackServerContext& context_;
  grpc::ServerUnaryReactor* const reactor_;
  const std::shared_ptr<CancelToken> cancel_;
};

// Answers a call at once.
inline grpc::ServerUnaryReactor* Answer(const ServiceContext& services,
                                        grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(services.status.ToGrpc(status, status.ok() ? std::string() : TraceOf(*context)));
  return reactor;
}

}  // namespace spillway
