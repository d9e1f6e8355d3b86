#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "grpcpp/security/server_credentials.h"
#include "host/base/descriptor.h"

namespace spillway {

// The certificate, the key and the clients' authorities that a server's TLS takes from files, and
// takes anew when they change. Not thread-safe, but for the credentials.
class Tls {
 public:
  // What Config::tls_certificate, tls_key and tls_client_ca name. Null where no certificate is.
  // INVALID_ARGUMENT names the setting and the file: it cannot be read, holds no PEM of its kind,
  // or key and certificate are no pair.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const Config& config);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // For one server, while this lives. Clients need a certificate of the authorities where
  // there are any.
  std::shared_ptr<grpc::ServerCredentials> Credentials() const;
  bool is_mutual() const { return !paths_[kClientCa].empty(); }

  // Reads the files again. Where they have changed connections that come a second later get what
  // they say now: true. Errors as Open, once for each change: what was said before stays.
  absl::StatusOr<bool> Reload();

 private:
  enum Part { kCertificate, kKey, kClientCa, kPartCount };
  using Texts = std::array<std::string, kPartCount>;

  explicit Tls(std::array<std::string, kPartCount> paths) : paths_(std::move(paths)) {}
  absl::StatusOr<Texts> Read() const;
  // INVALID_ARGUMENT, or what Take needs.
  absl::StatusOr<std::vector<Descriptor>> Check(const Texts& texts) const;
  absl::Status Take(const Texts& texts);

  const std::array<std::string, kPartCount> paths_;
  Texts seen_;  // the last time, good or not
  // Files in memory that hold what was good last, which gRPC reads once a second.
  std::array<Descriptor, kPartCount> held_;
};

}  // namespace spillway
