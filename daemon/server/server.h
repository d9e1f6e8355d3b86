#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/config/config.h"
#include "daemon/convert/status.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/engine.h"
#include "daemon/metrics/metrics.h"
#include "grpcpp/channel.h"

namespace spillway {

// What a drain waits for.
struct DrainProgress {
  bool open() const { return open_call_count + open_stream_count > 0; }

  int64_t open_call_count = 0;  // gRPC's, and those of doorbells
  int64_t open_stream_count = 0;
  double seconds_left = 0;  // of the grace
};

// The gRPC server with its services and health.
class Server {
 public:
  // Starts to serve, where config.listen is empty to this process alone. The
  // engine outlives it.
  // sweep_period: between two looks for expired sequences and silent clients.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const Config& config, Engine& engine, PastLosses losses = {},
      absl::Duration sweep_period = absl::Seconds(1));
  ~Server();

  // A channel to this server within the process.
  std::shared_ptr<grpc::Channel> InProcessChannel();
  const StatusConverter& status() const;
  // Of a server that listens nowhere: its process.
  Caller own_caller() const;
  // What clients connect to: unix:/path, or host:port with the port in use and with TLS
  // tls:host:port; empty where the server listens nowhere.
  const std::string& address() const;
  const std::string& boot_id() const;
  // What the daemon counts. Thread-safe.
  const Metrics& metrics() const;

  // Takes the settings that may change while it serves.
  void Apply(const Config& config);

  // Whether clients are served: that connections are accepted, calls answered, sequences looked
  // after, and some device does not only fail. Takes so long at most for each, but where gRPC
  // itself hangs. OK once it stops. For a watchdog.
  absl::Status CheckServing(absl::Duration timeout);

  // Refuses new work with UNAVAILABLE, reason DRAINING, and reports NOT_SERVING; GetStatistics is
  // still answered. What runs goes on. Once.
  void BeginDrain(absl::Duration grace);
  // REQUIRES: it drains.
  DrainProgress drain_progress() const;
  // Takes no more calls, and after so long cancels those that run and closes connections whose
  // clients have not noticed. Returns when all is over. REQUIRES: it drains.
  void Stop(absl::Duration last);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
