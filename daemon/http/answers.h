#pragma once

#include <string>
#include <string_view>

#include "services/metrics/metrics.h"

namespace spillway {

struct HttpRequest {
  std::string_view method;
  std::string_view target;  // as in the request line
  std::string_view host;    // the Host header; empty: none
};

struct HttpAnswer {
  int status = 200;
  const char* type = "text/plain; charset=utf-8";
  std::string body;
};

// What the daemon answers over HTTP. It knows nothing of connections. Thread-safe.
class Answers {
 public:
  // The metrics must outlive it. allow_remote: answer any Host header.
  Answers(bool allow_remote, const Metrics& metrics)
      : allow_remote_(allow_remote), metrics_(metrics) {}

  HttpAnswer To(const HttpRequest& request) const;

  // Whether the answer may take long, because it visits every model and sequence. Answers to
  // probes never do.
  static bool TakesLong(std::string_view target);

 private:
  const bool allow_remote_;
  const Metrics& metrics_;
};

}  // namespace spillway
