#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/metrics/metrics.h"

namespace spillway {

// What an operator looks at, by HTTP: the status page at /, its numbers at /status.json, all
// metrics for Prometheus at /metrics, /healthz while the process serves, and /readyz, which is
// 503 while the daemon should get no new work. It only reads.
class HttpServer {
 public:
  // address: host:port, port 0 for any that is free. The metrics outlive this. allow_remote:
  // answers whatever the request calls the host; else only where that is this machine, so that
  // no other site's page can read this one. UNAVAILABLE where the system refuses.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           bool allow_remote,
                                                           const Metrics& metrics);
  ~HttpServer();

  // With the port in use.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
