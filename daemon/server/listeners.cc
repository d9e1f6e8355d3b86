#include "daemon/server/listeners.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

absl::Status CannotListen(const std::string& where, int error) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", where, ": ", std::strerror(error)));
}

void SetOption(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

// If the system refuses, the result is not valid and errno is set.
Descriptor Listen(const addrinfo& address) {
  Descriptor listener(
      socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
  if (!listener.valid()) return listener;
  // Connections that linger after a daemon has ended must not keep the next daemon from listening.
  SetOption(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  // Accepted connections inherit this option and the following ones.
  SetOption(listener.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  // A client whose host or network is gone does not answer. Its connection then ends after a
  // minute, and the grace of its sequences begins. Probes start after 30 s of silence. On Linux
  // TCP_USER_TIMEOUT takes the place of TCP_KEEPCNT, and it also ends connections on which data is
  // not acknowledged.
  SetOption(listener.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(listener.get(), IPPROTO_TCP, TCP_KEEPIDLE, 30);
  SetOption(listener.get(), IPPROTO_TCP, TCP_KEEPINTVL, 10);
  SetOption(listener.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, 60'000);
  // [::] means all IPv6 and IPv4 addresses.
  if (address.ai_family == AF_INET6) SetOption(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(listener.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    const int error = errno;
    listener = Descriptor();
    errno = error;
  }
  return listener;
}

int PortOf(int listener) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  // The port is at the same offset in IPv4 and IPv6 addresses.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace

absl::StatusOr<Descriptor> ListenAtPath(const std::string& path, int type,
                                        const SocketAccess& access) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": longer than the ", sizeof(address.sun_path) - 1, " bytes of a socket's path"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  Descriptor listener(socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener.valid() ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return CannotListen(path, errno);
  }
  // Nobody can connect before listen(), so the group and mode are set first.
  absl::Status status;
  if (access.group && lchown(path.c_str(), static_cast<uid_t>(-1), *access.group) != 0) {
    status = absl::PermissionDeniedError(absl::StrCat("cannot give ", path, " to group ",
                                                      *access.group, ": ", std::strerror(errno)));
  } else if (chmod(path.c_str(), access.mode()) != 0 || listen(listener.get(), SOMAXCONN) != 0) {
    status = CannotListen(path, errno);
  }
  if (status.ok()) return listener;
  unlink(path.c_str());
  return status;
}

absl::StatusOr<TcpListeners> ListenAtTcp(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  TcpListeners listeners;
  int error = EADDRNOTAVAIL;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    // The first socket determines the port of all.
    if (listeners.port != 0) {
      reinterpret_cast<sockaddr_in*>(one->ai_addr)->sin_port =
          htons(static_cast<uint16_t>(listeners.port));
    }
    Descriptor listener = Listen(*one);
    if (listener.valid()) {
      listeners.port = PortOf(listener.get());
      listeners.sockets.push_back(std::move(listener));
      continue;
    }
    error = errno;
    // Other errors are ignored here: a name may have addresses of a family that this machine lacks.
    if (error == EADDRINUSE || error == EACCES) return CannotListen(address, error);
  }
  if (listeners.sockets.empty()) return CannotListen(address, error);
  return listeners;
}

}  // namespace spillway
