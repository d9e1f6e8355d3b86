#include "daemon/config/socket_path.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

absl::Status SystemError(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

absl::Status PrepareDirectory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return SystemError(absl::StrCat("cannot make ", directory));
  }
  struct stat info {};
  if (lstat(directory.c_str(), &info) != 0) {
    return SystemError(absl::StrCat("cannot read ", directory));
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(directory, " is not a directory"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(directory, " belongs to user ", info.st_uid,
                                                    ", not to this one (", geteuid(), ")"));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("others may write to ", directory, "; make it 0700"));
  }
  return absl::OkStatus();
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "[::1]" || host.starts_with("127.");
}

}  // namespace

absl::StatusOr<SocketPath> SocketPath::Claim(const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(),
                                                   " bytes is longer than the system's ",
                                                   sizeof(sockaddr_un::sun_path) - 1, ": ", path));
  }
  absl::Status status = PrepareDirectory(std::filesystem::path(path).parent_path().string());
  if (!status.ok()) return status;
  const std::string lock_path = path + ".lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) return SystemError(absl::StrCat("cannot open ", lock_path));
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    status = errno == EWOULDBLOCK
                 ? absl::AlreadyExistsError(absl::StrCat("another daemon listens on ", path))
                 : SystemError(absl::StrCat("cannot lock ", lock_path));
    close(lock);
    return status;
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      close(lock);
      return absl::FailedPreconditionError(absl::StrCat(path, " exists and is not a socket"));
    }
    // Nobody holds the lock, so nobody serves it.
    unlink(path.c_str());
  }
  return SocketPath(path, lock);
}

SocketPath::SocketPath(SocketPath&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

SocketPath::~SocketPath() {
  if (lock_ < 0) return;
  unlink(path_.c_str());
  // The lock file stays: removing it could let two daemons hold two of them.
  close(lock_);
}

absl::StatusOr<std::string> TcpAddress(const Config& config) {
  const std::string address = config.listen.substr(4);
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", config.listen, "\" is not tcp:host:port"));
  }
  if (!config.allow_remote && !IsLoopback(address.substr(0, colon))) {
    return absl::PermissionDeniedError(absl::StrCat(
        address, " is not a loopback address; anybody who reaches it could use the daemon. ",
        "--allow-remote listens there all the same"));
  }
  return address;
}

}  // namespace spillway
