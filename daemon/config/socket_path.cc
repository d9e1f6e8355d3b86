#include "daemon/config/socket_path.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

absl::Status SystemError(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

absl::Status PrepareDirectory(const std::string& directory, const SocketAccess& access) {
  if (mkdir(directory.c_str(), 0700) == 0) {
    // The group may only pass through the new directory.
    if (access.group && (chown(directory.c_str(), static_cast<uid_t>(-1), *access.group) != 0 ||
                         chmod(directory.c_str(), 0710) != 0)) {
      const absl::Status status =
          SystemError(absl::StrCat("cannot give ", directory, " to group ", *access.group));
      rmdir(directory.c_str());
      return status;
    }
  } else if (errno != EEXIST) {
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
                                                    ", not to this user (", geteuid(), ")"));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("others may write to ", directory, "; make it 0700"));
  }
  return absl::OkStatus();
}

std::string LockPath(const std::string& path) { return path + ".lock"; }

// Checks that need no system call.
absl::Status CheckPath(const std::string& path) {
  constexpr size_t kBytesMax = sizeof(sockaddr_un::sun_path) - 1 - kRegionsSuffix.size();
  if (path.size() > kBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the socket's path has ", path.size(), " bytes; at most ", kBytesMax,
                     " are possible, with room for ", kRegionsSuffix, ": ", path));
  }
  const std::string name = std::filesystem::path(path).filename().string();
  if (!path.starts_with('/') || name.empty() || name == "." || name == ".." ||
      path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"unix:", path, "\" does not name a file in a folder, as unix:/folder/name does"));
  }
  return absl::OkStatus();
}

// Whether there is a socket at the path; an error if there is something else.
absl::StatusOr<bool> FindSocket(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return false;
  if (S_ISSOCK(info.st_mode)) return true;
  return absl::FailedPreconditionError(
      absl::StrCat(path, S_ISDIR(info.st_mode) ? " is a directory, not the path of a socket"
                                               : " exists and is not a socket"));
}

absl::Status AnotherListens(const std::string& path) {
  return absl::AlreadyExistsError(absl::StrCat("another daemon listens on ", path));
}

// Whether a living process listens at the path. Its type of socket does not matter.
bool Answers(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());  // CheckPath() has checked the size
  const Descriptor probe(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
         (errno != ECONNREFUSED && errno != ENOENT);
}

// Whether a socket that a dead daemon left is at the path. An error if another file is there, or a
// process answers.
absl::StatusOr<bool> FindLeft(const std::string& path) {
  ASSIGN_OR_RETURN(const bool found, FindSocket(path));
  if (found && Answers(path)) return AnotherListens(path);
  return found;
}

// A daemon that ends removes its lock file. So after locking, check that the file still has this
// name, and try again if not.
absl::StatusOr<Descriptor> Lock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (;;) {
    Descriptor lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) return SystemError(absl::StrCat("cannot open ", lock_path));
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      return errno == EWOULDBLOCK ? AnotherListens(path)
                                  : SystemError(absl::StrCat("cannot lock ", lock_path));
    }
    struct stat held {};
    struct stat there {};
    if (fstat(lock.get(), &held) != 0) return SystemError(absl::StrCat("cannot read ", lock_path));
    if (lstat(lock_path.c_str(), &there) == 0 && there.st_dev == held.st_dev &&
        there.st_ino == held.st_ino) {
      return lock;
    }
  }
}

}  // namespace

bool IsLoopback(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || host.starts_with("127.");
}

absl::StatusOr<SocketAccess> SocketAccessOf(const Config& config) {
  SocketAccess access;
  const std::string& name = config.socket_group;
  if (name.empty()) return access;
  gid_t number = 0;
  // getgrnam is not thread-safe, but no other thread looks up groups yet.
  if (const group* const found = getgrnam(name.c_str()); found != nullptr) {
    access.group = found->gr_gid;
  } else if (absl::SimpleAtoi(name, &number) && number != static_cast<gid_t>(-1)) {
    access.group = number;
  } else {
    return absl::NotFoundError(
        absl::StrCat("server.socket_group (--socket-group): there is no group \"", name, "\""));
  }
  return access;
}

absl::StatusOr<SocketPath> SocketPath::Claim(const std::string& path, const SocketAccess& access) {
  RETURN_IF_ERROR(CheckPath(path));
  // Checked before anything is created, and again with the lock.
  RETURN_IF_ERROR(FindLeft(path).status());
  RETURN_IF_ERROR(PrepareDirectory(std::filesystem::path(path).parent_path().string(), access));
  ASSIGN_OR_RETURN(Descriptor lock, Lock(path));
  SocketPath claimed(path, access, std::move(lock));
  // The lock is not enough: somebody may have removed the lock file of a daemon that lives.
  for (const std::string& socket : {path, absl::StrCat(path, kRegionsSuffix)}) {
    ASSIGN_OR_RETURN(const bool is_left, FindLeft(socket));
    if (is_left) unlink(socket.c_str());
  }
  return claimed;
}

SocketPath::~SocketPath() {
  if (!lock_.valid()) return;
  for (const auto& [path, id] : noted_) {
    if (FileAt(path) == id) unlink(path.c_str());
  }
  if (HasLock()) unlink(LockPath(path_).c_str());
}

std::optional<SocketPath::FileId> SocketPath::FileAt(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return std::nullopt;
  return FileId(info.st_dev, info.st_ino);
}

bool SocketPath::HasLock() const {
  struct stat held {};
  return fstat(lock_.get(), &held) == 0 &&
         FileAt(LockPath(path_)) == FileId(held.st_dev, held.st_ino);
}

void SocketPath::NoteOwn(const std::string& path) {
  if (const std::optional<FileId> id = FileAt(path)) noted_.insert_or_assign(path, *id);
}

absl::StatusOr<std::vector<std::string>> SocketPath::FindGone() {
  std::vector<std::string> gone;
  if (!HasLock()) {
    RETURN_IF_ERROR(PrepareDirectory(std::filesystem::path(path_).parent_path().string(), access_));
    ASSIGN_OR_RETURN(lock_, Lock(path_));
    gone.push_back(LockPath(path_));
  }
  for (const auto& [path, id] : noted_) {
    const std::optional<FileId> there = FileAt(path);
    if (there && *there != id) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is not this daemon's socket any more: another file is there"));
    }
    if (!there) gone.push_back(path);
  }
  return gone;
}

absl::StatusOr<std::string> TcpAddress(const std::string& listen, bool allow_remote) {
  const std::string address = listen.substr(std::min<size_t>(4, listen.size()));
  const size_t colon = address.rfind(':');
  int port = -1;
  if (!listen.starts_with("tcp:") || colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", listen, "\" is not tcp:host:port"));
  }
  if (!allow_remote && !IsLoopback(address)) {
    return absl::PermissionDeniedError(absl::StrCat(
        address, " is not a loopback address; everybody who can reach it could use the daemon. ",
        "--allow-remote allows it"));
  }
  return address;
}

}  // namespace spillway
