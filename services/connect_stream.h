#pragma once

#include <atomic>
#include <memory>

#include "services/call.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway {

// One Connect call. Its client counts as connected until the call ends, for whatever reason.
class ConnectStream final : public grpc::ServerWriteReactor<v1::ConnectResponse>,
                            public OpenStream {
 public:
  ConnectStream(const ServiceContext& services, Caller caller,
                const absl::StatusOr<const v1::ConnectRequest*>& request);

  void Drain() override;
  // Ends the stream if the caller's token was revoked. The client is always silent.
  void CheckIdle(Clock::time_point now) override;

 private:
  void OnCancel() override;
  void OnDone() override;

  // Ends the call; later calls do nothing.
  void End(const absl::Status& status);

  const ServiceContext& services_;
  const Caller caller_;
  std::shared_ptr<Presence> client_;  // null if the call was refused
  std::atomic<bool> ended_ = false;
};

}  // namespace spillway
