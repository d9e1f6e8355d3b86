// A grpc::ClientContext with the deadline and the stop token of one call.
#pragma once

#include <functional>
#include <optional>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "spillway/presence.h"

namespace spillway {

class CallContext {
 public:
  // No deadline if `timeout` is infinite. client_id: that of the PresenceKeeper.
  CallContext(absl::Duration timeout, std::stop_token stop, const std::string& client_id)
      : on_stop_(std::move(stop), [this] { context_.TryCancel(); }) {
    context_.AddMetadata(kClientMetadata, client_id);
    if (timeout != absl::InfiniteDuration()) {
      // A time from now, so that setting the wall clock does not matter.
      context_.set_deadline(gpr_time_from_micros(absl::ToInt64Microseconds(timeout), GPR_TIMESPAN));
    }
  }

  grpc::ClientContext* get() { return &context_; }

 private:
  grpc::ClientContext context_;
  // Declared after the context, so that it is destroyed first: a stop never uses a destroyed
  // context.
  std::stop_callback<std::function<void()>> on_stop_;
};

}  // namespace spillway
