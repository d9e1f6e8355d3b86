// By what a client reaches a daemon over TCP, and who it says that it is.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/channel_arguments.h"

namespace spillway {

struct Access {
  // PEM files, of TLS. The authorities that the daemon's certificate rests on; empty: the
  // system's.
  std::string tls_ca;
  // The client's own certificate and its key, for daemons that ask for one; empty: none.
  std::string tls_certificate;
  std::string tls_key;
  // What `spillway tokens new` has printed, for daemons that ask for one; empty: none.
  std::string token;
};

// What the environment says: SPILLWAY_TLS_CA, SPILLWAY_TLS_CERT, SPILLWAY_TLS_KEY, SPILLWAY_TOKEN.
Access DefaultAccess();

// A channel to a target as NormalizeTarget takes it, or "tls:host:port". TLS is spoken there, and
// to a host:port without "tcp:" where a file of TLS is named. Connects with its first call.
// INVALID_ARGUMENT for a file that cannot be read, a certificate without its key, or a token that
// is none.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& target,
                                                           const Access& access,
                                                           grpc::ChannelArguments arguments = {});

}  // namespace spillway
