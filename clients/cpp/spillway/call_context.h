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
  // No deadline when `timeout` is infinite. client_id: as PresenceKeeper has it.
  CallContext(absl::Duration timeout, std::stop_token stop, const std::string& client_id)
      : on_stop_(std::move(stop), [this] { context_.TryCancel(); }) {
    context_.AddMetadata(kClientMetadata, client_id);
    if (timeout != absl::InfiniteDuration()) {
      context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    }
  }

  grpc::ClientContext* get() { return &context_; }

 private:
  grpc::ClientContext context_;
  // After the context: destroyed first, so that a stop never meets a dead one.
  std::stop_callback<std::function<void()>> on_stop_;
};

}  // namespace spillway
