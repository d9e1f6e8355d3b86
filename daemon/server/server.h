#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/config/config.h"
#include "daemon/convert/status.h"
#include "daemon/engine/engine.h"
#include "daemon/metrics/metrics.h"
#include "grpcpp/channel.h"

namespace spillway {

// The gRPC server with its services and health.
class Server {
 public:
  // Starts to serve, where config.listen is empty to this process alone. The
  // engine outlives it.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config, Engine& engine);
  ~Server();

  // A channel to this server within the process.
  std::shared_ptr<grpc::Channel> InProcessChannel();
  const StatusConverter& status() const;
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
  // itself hangs. OK once it drains. For a watchdog.
  absl::Status CheckServing(absl::Duration timeout);

  // Refuses new calls, reports NOT_SERVING, lets running calls finish, and
  // cancels what still runs after the grace time. Returns when all is over.
  void Drain(absl::Duration grace);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
