#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config/watched_file.h"
#include "grpcpp/security/server_credentials.h"
#include "host/base/descriptor.h"
#include "services/config/config.h"

namespace spillway {

// The files of a server's TLS: the certificate, its key, and the authorities that sign clients'
// certificates. They are read again when they change. Not thread-safe, except for the credentials.
class Tls {
 public:
  // Reads the files Config::tls_certificate, tls_key and tls_client_ca. Null if no certificate is
  // set. The error names the setting and the file: INVALID_ARGUMENT if the file cannot be read, is
  // not a regular file, has no PEM data of its kind, or has a key that does not fit the
  // certificate; DEADLINE_EXCEEDED if its file system does not answer.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const Config& config);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Credentials for one server, which this must outlive. If there are authorities, clients need a
  // certificate signed by one of them.
  std::shared_ptr<grpc::ServerCredentials> Credentials() const;
  bool is_mutual() const { return !files_[kClientCa].path().empty(); }

  // Reads the files again. True if they have changed: connections after one second or more use the
  // new contents. Wrong contents are not used, and give one error for each change, as from Open().
  absl::StatusOr<bool> Reload();

 private:
  enum Part { kCertificate, kKey, kClientCa, kPartCount };
  using Texts = std::array<std::string, kPartCount>;

  explicit Tls(std::array<WatchedFile, kPartCount> files) : files_(std::move(files)) {}
  absl::StatusOr<Texts> Read(absl::Duration wait);
  // Files in memory that hold the texts; INVALID_ARGUMENT if they are wrong.
  absl::StatusOr<std::vector<Descriptor>> Check(const Texts& texts) const;
  absl::Status Take(const Texts& texts);

  std::array<WatchedFile, kPartCount> files_;  // without a path: not used
  absl::StatusOr<Texts> seen_;                 // what was read last, valid or not
  // Files in memory with the last valid texts. gRPC reads them once per second.
  std::array<Descriptor, kPartCount> held_;
};

}  // namespace spillway
