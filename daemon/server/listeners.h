#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config/socket_path.h"
#include "host/base/descriptor.h"

namespace spillway {

// A unix socket of the given type, such as SOCK_STREAM, that listens at a path where no file
// exists. The umask has no effect. INVALID_ARGUMENT if the path is too long; UNAVAILABLE if the
// system refuses; PERMISSION_DENIED if this user may not give the socket to the group.
absl::StatusOr<Descriptor> ListenAtPath(const std::string& path, int type,
                                        const SocketAccess& access);

struct TcpListeners {
  std::vector<Descriptor> sockets;  // one for each address of the host
  int port = 0;
};

// Sockets that listen at host:port or [host]:port; port 0 chooses a free port. UNAVAILABLE if the
// host is not found, or the address is in use.
absl::StatusOr<TcpListeners> ListenAtTcp(const std::string& address);

}  // namespace spillway
