#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config/socket_path.h"
#include "host/base/descriptor.h"

namespace spillway {

// A unix socket of a type such as SOCK_STREAM that listens at a path where nothing
// is, whatever the umask. UNAVAILABLE where the system refuses; PERMISSION_DENIED
// where this user may not give it to that group.
absl::StatusOr<Descriptor> ListenAtPath(const std::string& path, int type,
                                        const SocketAccess& access);

struct TcpListeners {
  std::vector<Descriptor> sockets;  // one for each address of the host
  int port = 0;
};

// Sockets that listen at host:port, or [host]:port; at port 0 at one that is free.
// UNAVAILABLE where the host is not found, or somebody else listens there.
absl::StatusOr<TcpListeners> ListenAtTcp(const std::string& address);

}  // namespace spillway
