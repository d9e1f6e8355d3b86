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

// How far a drain is.
struct DrainProgress {
  bool open() const { return open_call_count + open_stream_count > 0; }

  int64_t open_call_count = 0;  // running unary calls and doorbell calls
  int64_t open_stream_count = 0;
  double seconds_left = 0;  // until the grace ends
};

// The gRPC server with its services and health.
class Server {
 public:
  // Starts to serve. If config.listen is empty, only this process can connect, through
  // InProcessChannel(). The engine must outlive the server.
  // sweep_period: time between two checks for expired sequences and silent clients.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const Config& config, Engine& engine, PastLosses losses = {},
      absl::Duration sweep_period = absl::Seconds(1));
  ~Server();

  // A channel to this server within the process.
  std::shared_ptr<grpc::Channel> InProcessChannel();
  const StatusConverter& status() const;
  // The caller of a server that listens nowhere: the process itself.
  Caller own_caller() const;
  // The address for clients: unix:/path, host:port or, with TLS, tls:host:port. The port is the one
  // in use. Empty if the server listens nowhere.
  const std::string& address() const;
  const std::string& boot_id() const;
  // All metrics of the daemon. Thread-safe.
  const Metrics& metrics() const;

  // Applies the settings that may change while the server runs.
  void Apply(const Config& config);

  // For a watchdog: checks that connections are accepted, that calls are answered, that the sweeper
  // runs, and that not all devices are lost. Each check takes at most `timeout`, unless gRPC itself
  // hangs. OK once Stop() has begun.
  absl::Status CheckServing(absl::Duration timeout);

  // From now on refuses new work with UNAVAILABLE, reason DRAINING, and reports NOT_SERVING.
  // GetStatistics is still answered. Running work continues. Call it only once.
  void BeginDrain(absl::Duration grace);
  // REQUIRES: BeginDrain() was called.
  DrainProgress drain_progress() const;
  // Accepts no more calls. After `last` it cancels the running calls, and closes connections whose
  // clients have not noticed the shutdown. Returns when all calls have ended. REQUIRES:
  // BeginDrain() was called.
  void Stop(absl::Duration last);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
