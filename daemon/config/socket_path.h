#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/config/config.h"
#include "host/base/descriptor.h"

namespace spillway {

// What the path of the socket that hands over regions has behind the daemon's own.
inline constexpr absl::string_view kRegionsSuffix = ".regions";

// Who may connect to a unix socket: its user alone, or a group too.
struct SocketAccess {
  std::optional<gid_t> group;
  mode_t mode() const { return group ? 0660 : 0600; }
};

// What Config::socket_group says, the name or number of a group. NOT_FOUND where
// there is no such group.
absl::StatusOr<SocketAccess> SocketAccessOf(const Config& config);

// A unix socket's path, held for one daemon: a lock file beside it keeps
// others away and is unlocked with the process. Removes both when it goes.
class SocketPath {
 public:
  // Makes the directory where it is missing, 0700, or 0710 for a group; refuses one that belongs
  // to somebody else or that others may write to (PERMISSION_DENIED). A socket that a dead
  // daemon left is removed; ALREADY_EXISTS while another daemon holds it. A path
  // that names no file or is too long for a socket and kRegionsSuffix is
  // INVALID_ARGUMENT, one where something else stands FAILED_PRECONDITION. What is
  // refused leaves no lock file.
  static absl::StatusOr<SocketPath> Claim(const std::string& path, const SocketAccess& access);
  SocketPath(SocketPath&& other) noexcept = default;
  SocketPath& operator=(SocketPath&&) = delete;
  ~SocketPath();

 private:
  SocketPath(std::string path, Descriptor lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  std::string path_;
  Descriptor lock_;  // not valid when moved from
};

// Whether host:port is reached from this machine alone.
bool IsLoopback(const std::string& address);

// host:port of "tcp:host:port" as gRPC takes it. PERMISSION_DENIED for a host
// that is not loopback unless allowed.
absl::StatusOr<std::string> TcpAddress(const std::string& listen, bool allow_remote);

}  // namespace spillway
