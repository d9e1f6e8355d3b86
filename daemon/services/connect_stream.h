#pragma once

#include <atomic>
#include <memory>

#include "daemon/services/call.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway {

// One Connect: its client is there until it ends, however it ends.
class ConnectStream final : public grpc::ServerWriteReactor<v1::ConnectResponse>,
                            public OpenStream {
 public:
  ConnectStream(const ServiceContext& services, Caller caller,
                const absl::StatusOr<const v1::ConnectRequest*>& request);

  void Drain() override;
  // Not how long the client is silent, which it is always, but whether its token is good.
  void CheckIdle(Clock::time_point now) override;

 private:
  void OnCancel() override;
  void OnDone() override;

  // Once.
  void End(const absl::Status& status);

  const ServiceContext& services_;
  const Caller caller_;
  std::shared_ptr<Presence> client_;  // null where it was refused
  std::atomic<bool> ended_ = false;
};

}  // namespace spillway
