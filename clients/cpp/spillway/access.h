// TLS files and token with which a client connects to a daemon.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/channel_arguments.h"

namespace spillway {

struct Access {
  // PEM file of the authorities that sign the daemon's certificate; empty: the system's.
  std::string tls_ca;
  // PEM files of the client's certificate and its key, for daemons that ask for one; empty: none.
  std::string tls_certificate;
  std::string tls_key;
  // The token that `spillway tokens new` printed, for daemons that ask for one; empty: none.
  std::string token;
};

// The access from the environment: SPILLWAY_TLS_CA, SPILLWAY_TLS_CERT, SPILLWAY_TLS_KEY,
// SPILLWAY_TOKEN.
Access DefaultAccess();

// Opens a channel. target: as for NormalizeTarget, or "tls:host:port". TLS is used for "tls:",
// and for host:port without "tcp:" if tls_ca or tls_certificate is set. The channel connects with
// its first call. INVALID_ARGUMENT if a file cannot be read, a certificate has no key, or the
// token has invalid characters.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& target,
                                                           const Access& access,
                                                           grpc::ChannelArguments arguments = {});

}  // namespace spillway
