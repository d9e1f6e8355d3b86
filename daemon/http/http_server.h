#pragma once

#include <memory>
#include <vector>

#include "host/base/descriptor.h"
#include "services/metrics/metrics.h"

namespace spillway {

// HTTP for operators: the status page at /, its numbers at /status.json, all metrics for Prometheus
// at /metrics, /healthz (200 while the process serves), and /readyz (503 while the daemon should
// get no new work). It changes nothing.
//
// Anybody who reaches the port can use it, so all that a connection can take is limited: the bytes
// of a request, the time for it and for its answer, and the number of connections. A new connection
// beyond this number takes the place of the oldest one, so silent connections keep out no probe
// (docs/adr/0062).
class HttpServer {
 public:
  // Begins to accept connections. listeners: TCP sockets that listen. The metrics must outlive the
  // server. allow_remote: answer any Host header. Otherwise only requests whose Host header names
  // this machine are answered, so that pages of other sites cannot read this one.
  HttpServer(std::vector<Descriptor> listeners, bool allow_remote, const Metrics& metrics);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
