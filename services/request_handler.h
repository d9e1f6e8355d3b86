#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/caller.h"
#include "grpc/grpc.h"
#include "grpcpp/impl/call.h"
#include "grpcpp/impl/rpc_service_method.h"
#include "grpcpp/server_context.h"
#include "services/received.h"
#include "services/waiting_calls.h"

namespace spillway {

// A handler of a method that takes one request. It checks callers when the headers of their calls
// arrive, reads the requests of those who may call, and passes them to gRPC's own handler. gRPC
// itself would show us a call only when its request is complete, and until then hold it for a
// client that nobody knows (docs/adr/0056). The method must be registered as one with a stream of
// requests, which is the same on the wire.
template <typename Request>
class RequestHandler final : public grpc::internal::MethodHandler {
 public:
  using LetIn = std::function<absl::StatusOr<Caller>(const grpc::CallbackServerContext&)>;

  // handler: of the method with Received<Request>. open_count: counts the calls that it serves;
  // may be null. `waiting` must outlive this.
  RequestHandler(std::unique_ptr<MethodHandler> handler, LetIn let_in, WaitingCalls& waiting,
                 std::atomic<int64_t>* open_count)
      : handler_(std::move(handler)),
        let_in_(std::move(let_in)),
        waiting_(waiting),
        open_count_(open_count) {}

  void RunHandler(const HandlerParameter& call) override {
    absl::StatusOr<Caller> caller =
        let_in_(static_cast<const grpc::CallbackServerContext&>(*call.server_context));
    if (caller.ok()) {
      (new Reading(*this, call, *std::move(caller)))->Start();
    } else {
      Serve(call, nullptr, std::move(caller));
    }
  }

 private:
  // A call whose request has not arrived. gRPC runs it as a functor when that ends.
  class Reading : public grpc_completion_queue_functor {
   public:
    Reading(RequestHandler& handler, const HandlerParameter& parameter, Caller caller)
        : handler_(handler),
          call_(*parameter.call),
          parameter_(&call_, parameter.server_context, nullptr, parameter.status, nullptr,
                     parameter.call_requester),
          caller_(std::move(caller)) {
      functor_run = [](grpc_completion_queue_functor* self, int) {
        static_cast<Reading*>(self)->End();
      };
      inlineable = true;
    }
    void Start() {
      place_ = handler_.waiting_.Add(call_.call());
      grpc_op read = {};
      read.op = GRPC_OP_RECV_MESSAGE;
      read.data.recv_message.recv_message = &request_;
      [[maybe_unused]] const grpc_call_error error = grpc_call_start_batch(
          call_.call(), &read, 1, static_cast<grpc_completion_queue_functor*>(this), nullptr);
      assert(error == GRPC_CALL_OK);
    }

   private:
    void End() {
      handler_.waiting_.Remove(place_);
      if (request_ == nullptr) {
        caller_ = absl::CancelledError("the call has ended before its request arrived");
      }
      handler_.Serve(parameter_, request_, std::move(caller_));
      delete this;
    }

    RequestHandler& handler_;
    grpc::internal::Call call_;
    const HandlerParameter parameter_;
    absl::StatusOr<Caller> caller_;
    WaitingCalls::Place place_;
    grpc_byte_buffer* request_ = nullptr;
  };

  // request: null if none has arrived.
  void Serve(const HandlerParameter& call, grpc_byte_buffer* request,
             absl::StatusOr<Caller> caller) {
    grpc::Status status;
    void* data = nullptr;
    auto* const received = static_cast<Received<Request>*>(
        handler_->Deserialize(call.call->call(), request, &status, &data));
    received->LetIn(std::move(caller), open_count_);
    handler_->RunHandler(HandlerParameter(call.call, call.server_context, received, status, data,
                                          call.call_requester));
  }

  const std::unique_ptr<MethodHandler> handler_;
  const LetIn let_in_;
  WaitingCalls& waiting_;
  std::atomic<int64_t>* const open_count_;
};

}  // namespace spillway
