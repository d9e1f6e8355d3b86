#include "services/connect_stream.h"

#include <utility>

namespace spillway {

ConnectStream::ConnectStream(const ServiceContext& services, Caller caller,
                             const absl::StatusOr<const v1::ConnectRequest*>& request)
    : services_(services), caller_(std::move(caller)) {
  absl::StatusOr<std::shared_ptr<Presence>> client =
      request.ok() ? ClientOf(services_, caller_, (*request)->client_id(), "client_id")
                   : request.status();
  if (!client.ok()) {
    End(client.status());
    return;
  }
  client_ = *std::move(client);
  services_.engine.clients().Come(*client_);
  services_.streams.AddUncounted(this);
}

void ConnectStream::Drain() { End(absl::UnavailableError("the daemon is shutting down")); }

void ConnectStream::CheckIdle(Clock::time_point /*now*/) {
  if (absl::Status status = caller_.Check(); !status.ok()) End(status);
}

void ConnectStream::OnCancel() { End(absl::CancelledError("the client has gone")); }

void ConnectStream::End(const absl::Status& status) {
  if (!ended_.exchange(true)) Finish(services_.status.ToGrpc(status, caller_.trace()));
}

void ConnectStream::OnDone() {
  if (client_ != nullptr) {
    services_.streams.Remove(this);
    services_.engine.ClientGoes(*client_);
  }
  delete this;
}

}  // namespace spillway
