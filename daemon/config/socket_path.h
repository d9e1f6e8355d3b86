#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config/config.h"

namespace spillway {

// A unix socket's path, held for one daemon: a lock file beside it keeps
// others away and goes with the process. Removes the socket when it goes.
class SocketPath {
 public:
  // Makes the directory, 0700, where it is missing; refuses one that belongs
  // to somebody else or that others may write to (PERMISSION_DENIED). A socket that a dead
  // daemon left is removed; ALREADY_EXISTS while another daemon holds it.
  static absl::StatusOr<SocketPath> Claim(const std::string& path);
  SocketPath(SocketPath&& other) noexcept;
  SocketPath& operator=(SocketPath&&) = delete;
  ~SocketPath();

 private:
  SocketPath(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  std::string path_;
  int lock_;  // descriptor, -1 when moved from
};

// host:port of "tcp:host:port" as gRPC takes it. PERMISSION_DENIED for a host
// that is not loopback unless allowed.
absl::StatusOr<std::string> TcpAddress(const Config& config);

}  // namespace spillway
