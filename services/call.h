#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/caller.h"
#include "grpcpp/grpcpp.h"
#include "host/device/cancel.h"
#include "services/context.h"

namespace spillway {

// The metadata with which a call names its client. A call without it counts as one of a client that
// never disconnects.
inline constexpr char kClientMetadata[] = "spillway-client";

// The namespace and the client of the call. UNAUTHENTICATED if tokens are required and the call has
// no valid one; INVALID_ARGUMENT for an invalid client id.
absl::StatusOr<Caller> CallerOf(const ServiceContext& services,
                                const grpc::CallbackServerContext& context);

// The id of the call in the client's tracing: the trace id of `traceparent`, or else
// `x-request-id`. A header that is invalid or occurs more than once is ignored. Empty if there is
// no id.
std::string TraceOf(const grpc::CallbackServerContext& context);

// The client with an id that the caller sent. INVALID_ARGUMENT names `field` if the id is invalid.
absl::StatusOr<std::shared_ptr<Presence>> ClientOf(const ServiceContext& services,
                                                   const Caller& caller, std::string_view id,
                                                   const std::string& field);

// A token that is cancelled at the deadline of the call.
std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context);

// A unary call that is answered later. It uses gRPC's own reactor, because with a reactor of ours
// gRPC would wake a thread after every answer to report its end.
class UnaryCall {
 public:
  UnaryCall(const ServiceContext& services, grpc::CallbackServerContext& context);
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  // The handler returns this. REQUIRES: called before the call may end.
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  // Cancelled with the call and at its deadline. Must not be used after End().
  const std::shared_ptr<CancelToken>& cancel() const { return cancel_; }
  // Answers the call and deletes this. Called once, by any thread.
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
