// gRPC reads a connection with recvmsg, a TLS session with SSL_read, and calls close at its end.
// These definitions in the program take the place of those in the libraries, and show to the
// ConnectionShield what was read (docs/adr/0056).
#include "daemon/server/shielded_reads.h"

#include <dlfcn.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "daemon/server/connection_shield.h"

namespace spillway {
namespace {

using Connection = ConnectionShield::Connection;

// Whether libraries that call `name` get `own`.
bool IsTaken(const char* name, const void* own) { return dlsym(RTLD_DEFAULT, name) == own; }

}  // namespace

bool ReadsAreShielded() {
  return IsTaken("recvmsg", reinterpret_cast<const void*>(&recvmsg)) &&
         IsTaken("SSL_read", reinterpret_cast<const void*>(&SSL_read)) &&
         IsTaken("close", reinterpret_cast<const void*>(&close));
}

}  // namespace spillway

extern "C" {

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const ssize_t received = syscall(SYS_recvmsg, fd, message, flags);
  if (received <= 0 || (flags & MSG_ERRQUEUE) != 0) return received;
  spillway::Connection* const connection = spillway::ConnectionShield::Find(fd);
  if (connection == nullptr || connection->is_tls) return received;
  size_t left = received;
  for (size_t i = 0; i < message->msg_iovlen && left > 0; ++i) {
    const iovec& part = message->msg_iov[i];
    const size_t bytes = std::min(left, part.iov_len);
    left -= bytes;
    if (!spillway::ConnectionShield::Get().Take(*connection,
                                                {static_cast<const char*>(part.iov_base), bytes})) {
      errno = ECONNRESET;
      return -1;
    }
  }
  return received;
}

int SSL_read(SSL* session, void* buffer, int size) {
  static const auto read =
      reinterpret_cast<int (*)(SSL*, void*, int)>(dlsym(RTLD_NEXT, "SSL_read"));
  const int received = read(session, buffer, size);
  if (received <= 0) return received;
  spillway::Connection* const connection = spillway::ConnectionShield::FindSession(session);
  if (connection == nullptr ||
      spillway::ConnectionShield::Get().Take(
          *connection, {static_cast<const char*>(buffer), static_cast<size_t>(received)})) {
    return received;
  }
  return -1;
}

int close(int fd) {
  spillway::Connection* const connection = spillway::ConnectionShield::Find(fd);
  if (connection != nullptr) spillway::ConnectionShield::Get().Forget(*connection);
  return static_cast<int>(syscall(SYS_close, fd));
}

}  // extern "C"
