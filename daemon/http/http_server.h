#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/metrics/metrics.h"

namespace spillway {

// HTTP for operators: the status page at /, its numbers at /status.json, all metrics for Prometheus
// at /metrics, /healthz (200 while the process serves), and /readyz (503 while the daemon should
// get no new work). It changes nothing.
class HttpServer {
 public:
  // address: host:port; port 0: any free port. The metrics must outlive the server. allow_remote:
  // answer any Host header. Otherwise only requests whose Host header names this machine are
  // answered, so that pages of other sites cannot read this one. UNAVAILABLE if the system refuses.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           bool allow_remote,
                                                           const Metrics& metrics);
  ~HttpServer();

  // host:port with the port in use.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
