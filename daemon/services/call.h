#pragma once

#include <memory>

#include "absl/status/status.h"
#include "daemon/services/context.h"
#include "grpcpp/grpcpp.h"
#include "host/device/cancel.h"

namespace spillway {

// Stops with the call's deadline.
std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context);

// A unary call that is answered later: End is called once, from any thread.
class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(const ServiceContext& services, const grpc::CallbackServerContext& context)
      : services_(services), cancel_(MakeCancelToken(context)) {}

  void End(const absl::Status& status) { Finish(services_.status.ToGrpc(status)); }
  const std::shared_ptr<CancelToken>& cancel() const { return cancel_; }

 protected:
  const ServiceContext& services_;

 private:
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override { delete this; }

  const std::shared_ptr<CancelToken> cancel_;
};

// Answers a call at once.
inline grpc::ServerUnaryReactor* Answer(const ServiceContext& services,
                                        grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(services.status.ToGrpc(status));
  return reactor;
}

}  // namespace spillway
