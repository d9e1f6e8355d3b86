#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/caller.h"
#include "engine/engine.h"
#include "engine/regions.h"
#include "grpcpp/channel.h"
#include "grpcpp/server_builder.h"
#include "services/authenticator.h"
#include "services/config/config.h"
#include "services/convert/status.h"
#include "services/log/event_log.h"
#include "services/metrics/metrics.h"

namespace spillway {

// How far a drain is.
struct DrainProgress {
  bool open() const { return open_call_count + open_stream_count > 0; }

  int64_t open_call_count = 0;  // running unary calls and doorbell calls
  int64_t open_stream_count = 0;
  double seconds_left = 0;  // until the grace ends
};

// The services and health on a gRPC server. By itself it listens nowhere: only its own process can
// reach it.
class Server {
 public:
  // What stands between the server and other processes.
  struct Outside {
    // kProcess: there are no other processes, and every call is this process's.
    RegionTable::Kind regions = RegionTable::Kind::kProcess;
    // File name of the socket for regions, in the folder of the server's own; empty: none.
    std::string region_socket;
    // Null: calls need no token. Must outlive the server.
    const Authenticator* tokens = nullptr;
    PastLosses losses;
    // Why new clients cannot connect; empty if they can.
    std::function<std::string()> trouble = [] { return std::string(); };
    // Adds the counts of connections.
    std::function<void(ServerCounts&)> count = [](ServerCounts&) {};
    // Further work for each turn of the sweeper.
    std::function<void()> sweep = [] {};
  };

  // The engine must outlive the server. sweep_period: time between two checks for expired sequences
  // and silent clients.
  Server(const Config& config, Engine& engine, Outside outside,
         absl::Duration sweep_period = absl::Seconds(1));
  ~Server();

  // Serves calls through InProcessChannel(), and of the connections that the builder has acceptors
  // for. UNAVAILABLE if gRPC does not start. Call it only once; the functions below that speak of
  // calls need it.
  absl::Status Start(grpc::ServerBuilder& builder);

  // A channel to this server within the process.
  std::shared_ptr<grpc::Channel> InProcessChannel();
  const StatusConverter& status() const;
  // The caller of a server that listens nowhere: the process itself.
  Caller own_caller() const;
  const std::string& boot_id() const;
  // All metrics. Thread-safe.
  const Metrics& metrics() const;
  EventLog& events();
  RegionTable& regions();
  // Most memory that gRPC uses for messages which no handler has seen, beyond the memory limit.
  int64_t transport_bytes_max() const;

  // Applies the settings that may change while the server runs.
  void Apply(const Config& config);

  // For a watchdog: checks that calls are answered, that the sweeper runs, and that not all devices
  // are lost. Takes at most `timeout`, unless gRPC itself hangs. OK once Stop() has begun.
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
  // Ends the sweeper, and with it the calls of Outside::sweep. A second call does nothing.
  void StopSweeping();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
