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

// The files of a server's TLS: the certificate, its key, and the authorities that sign clients'
// certificates. They are read again when they change. Not thread-safe, except for the credentials.
class Tls {
 public:
  // Reads the files Config::tls_certificate, tls_key and tls_client_ca. Null if no certificate is
  // set. INVALID_ARGUMENT names the setting and the file if the file cannot be read, has no PEM
  // data of its kind, or has a key that does not fit the certificate.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const Config& config);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Credentials for one server, which this must outlive. If there are authorities, clients need a
  // certificate signed by one of them.
  std::shared_ptr<grpc::ServerCredentials> Credentials() const;
  bool is_mutual() const { return !paths_[kClientCa].empty(); }

  // Reads the files again. True if they have changed: connections after one second or more use the
  // new contents. Wrong contents are not used, and give one error for each change, as from Open().
  // A file that cannot be read counts as unchanged.
  absl::StatusOr<bool> Reload();

 private:
  enum Part { kCertificate, kKey, kClientCa, kPartCount };
  using Texts = std::array<std::string, kPartCount>;

  explicit Tls(std::array<std::string, kPartCount> paths) : paths_(std::move(paths)) {}
  absl::StatusOr<Texts> Read() const;
  // Files in memory that hold the texts; INVALID_ARGUMENT if they are wrong.
  absl::StatusOr<std::vector<Descriptor>> Check(const Texts& texts) const;
  absl::Status Take(const Texts& texts);

  const std::array<std::string, kPartCount> paths_;
  Texts seen_;  // the texts read last, valid or not
  // Files in memory with the last valid texts. gRPC reads them once per second.
  std::array<Descriptor, kPartCount> held_;
};

}  // namespace spillway
