#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "host/base/descriptor.h"
#include "services/config/config.h"

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

// The path of a unix socket, and that of its regions, reserved for one daemon. A lock file next to
// them keeps other daemons away; the lock ends with the process. Others may remove these files or
// put theirs there, so this knows its own by their inodes. The destructor removes its own files.
// Not thread-safe.
class SocketPath {
 public:
  // Creates the directory if it is missing, with mode 0700, or 0710 for a group. Removes sockets
  // that a dead daemon left. On an error, no lock file is left. Errors: PERMISSION_DENIED if the
  // directory belongs to another user or others may write to it; ALREADY_EXISTS if another daemon
  // holds the path, or a process answers there; INVALID_ARGUMENT if the path does not name a file,
  // or is too long for a socket with kRegionsSuffix; FAILED_PRECONDITION if something other than a
  // socket exists there.
  static absl::StatusOr<SocketPath> Claim(const std::string& path, const SocketAccess& access);
  SocketPath(SocketPath&& other) noexcept = default;
  SocketPath& operator=(SocketPath&&) = delete;
  ~SocketPath();

  // Notes that the file at this path, with or without kRegionsSuffix, is a socket of the daemon.
  void NoteOwn(const std::string& path);
  // Looks whether the files are still there. If the lock file is gone, makes it again. Returns the
  // paths at which noted sockets, or the lock file, were gone. The caller listens there again.
  // Errors as Claim() if another daemon has the lock now, or if another file is at one of the
  // paths.
  absl::StatusOr<std::vector<std::string>> FindGone();

 private:
  using FileId = std::pair<dev_t, ino_t>;

  SocketPath(std::string path, const SocketAccess& access, Descriptor lock)
      : path_(std::move(path)), access_(access), lock_(std::move(lock)) {}
  static std::optional<FileId> FileAt(const std::string& path);  // nullopt: there is none
  bool HasLock() const;

  std::string path_;
  SocketAccess access_;
  Descriptor lock_;                      // not valid after a move
  std::map<std::string, FileId> noted_;  // the daemon's sockets
};

// Whether host:port can be reached only from this machine.
bool IsLoopback(const std::string& address);

// host:port of "tcp:host:port", in gRPC's form. PERMISSION_DENIED for a host that is not loopback,
// unless allow_remote.
absl::StatusOr<std::string> TcpAddress(const std::string& listen, bool allow_remote);

}  // namespace spillway
