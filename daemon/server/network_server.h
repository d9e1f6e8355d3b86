#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/access/token_table.h"
#include "daemon/server/acceptor.h"
#include "daemon/server/local_sockets.h"
#include "daemon/server/memory_watch.h"
#include "daemon/server/tls.h"
#include "services/config/config.h"
#include "services/server.h"

namespace spillway {

// A server that other processes can reach: at a unix socket, a TCP address, or both, with TLS and
// tokens as the settings ask.
class NetworkServer {
 public:
  // Starts to serve. The engine must outlive the server. REQUIRES: config.listen is not empty.
  // sweep_period: as of Server. Errors as Tls::Open, TokenTable::Open, LocalSockets::Open,
  // ListenAtTcp and Server::Start.
  static absl::StatusOr<std::unique_ptr<NetworkServer>> Start(
      const Config& config, Engine& engine, PastLosses losses = {},
      absl::Duration sweep_period = absl::Seconds(1));
  ~NetworkServer();
  NetworkServer(const NetworkServer&) = delete;
  NetworkServer& operator=(const NetworkServer&) = delete;

  // The address for clients: unix:/path, host:port or, with TLS, tls:host:port. The port is the one
  // in use.
  const std::string& address() const { return address_; }
  const std::string& boot_id() const { return server_->boot_id(); }
  // All metrics of the daemon. Thread-safe.
  const Metrics& metrics() const { return server_->metrics(); }

  // As of Server. The settings are also those of the connections.
  void Apply(const Config& config);
  // As of Server. Also checks that connections are accepted. Each check takes at most `timeout`.
  absl::Status CheckServing(absl::Duration timeout);
  // As of Server.
  void BeginDrain(absl::Duration grace) { server_->BeginDrain(grace); }
  DrainProgress drain_progress() const { return server_->drain_progress(); }
  // As of Server. Refuses new connections first.
  void Stop(absl::Duration last);

 private:
  NetworkServer() = default;
  // A turn of the sweeper.
  void Sweep();

  std::unique_ptr<Tls> tls_;            // null: no TLS
  std::unique_ptr<TokenTable> tokens_;  // null: calls need no token
  std::unique_ptr<Server> server_;
  std::unique_ptr<LocalSockets> sockets_;  // null: no unix socket
  std::string address_;
  // One for the unix socket, which is the first, and one for the TCP address, as far as the server
  // listens there. Declared after `server_`, to which they pass connections, so that they are
  // destroyed before it.
  std::vector<std::unique_ptr<Acceptor>> acceptors_;
  // Null if connections are not shielded.
  std::unique_ptr<MemoryWatch> memory_watch_;
};

}  // namespace spillway
