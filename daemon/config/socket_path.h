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

// The path of the regions' socket is that of the daemon's socket with this suffix.
inline constexpr absl::string_view kRegionsSuffix = ".regions";

// Who may connect to a unix socket: only its user, or also a group.
struct SocketAccess {
  std::optional<gid_t> group;
  mode_t mode() const { return group ? 0660 : 0600; }
};

// The access that Config::socket_group asks for, by name or number. NOT_FOUND if there is no such
// group.
absl::StatusOr<SocketAccess> SocketAccessOf(const Config& config);

// The path of a unix socket, reserved for one daemon. A lock file next to it keeps other daemons
// away; the lock ends with the process. The destructor removes both files.
class SocketPath {
 public:
  // Creates the directory if it is missing, with mode 0700, or 0710 for a group. Removes a socket
  // that a dead daemon left. On an error, no lock file is left. Errors: PERMISSION_DENIED if the
  // directory belongs to another user or others may write to it; ALREADY_EXISTS if another daemon
  // holds the path; INVALID_ARGUMENT if the path does not name a file, or is too long for a socket
  // with kRegionsSuffix; FAILED_PRECONDITION if something other than a socket exists there.
  static absl::StatusOr<SocketPath> Claim(const std::string& path, const SocketAccess& access);
  SocketPath(SocketPath&& other) noexcept = default;
  SocketPath& operator=(SocketPath&&) = delete;
  ~SocketPath();

 private:
  SocketPath(std::string path, Descriptor lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  std::string path_;
  Descriptor lock_;  // not valid after a move
};

// Whether host:port can be reached only from this machine.
bool IsLoopback(const std::string& address);

// host:port of "tcp:host:port", in gRPC's form. PERMISSION_DENIED for a host that is not loopback,
// unless allow_remote.
absl::StatusOr<std::string> TcpAddress(const std::string& listen, bool allow_remote);

}  // namespace spillway
