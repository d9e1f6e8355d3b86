#include "host/memory/arena_folder.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

absl::Status SystemError(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

// REQUIRES: `folder` is a descriptor of `path`.
absl::Status CheckFolder(int folder, const std::string& path) {
  struct stat info {};
  struct statfs system {};
  if (fstat(folder, &info) != 0 || fstatfs(folder, &system) != 0) {
    return SystemError(absl::StrCat("cannot read ", path));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to user ", info.st_uid,
                                                    ", not to this user (", geteuid(), ")"));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("others may write to ", path, "; make it 0700"));
  }
  if (system.f_type != TMPFS_MAGIC && system.f_type != HUGETLBFS_MAGIC) {
    return absl::FailedPreconditionError(absl::StrCat(
        path,
        " is not on tmpfs or hugetlbfs; choose a folder that is, such as one below /dev/shm"));
  }
  return absl::OkStatus();
}

// The holder of the lock wrote its process number there. A file on hugetlbfs holds no text.
std::string Holder(int lock) {
  char text[16] = {};
  const ssize_t count = pread(lock, text, sizeof(text) - 1, 0);
  const std::string number(text, static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return number.empty() ? "another process" : "process " + number;
}

}  // namespace

absl::StatusOr<ArenaFolder> ArenaFolder::Open(const std::string& path) {
  if (!path.starts_with('/')) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena folder \"", path, "\" is not an absolute path"));
  }
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return SystemError(absl::StrCat("cannot make ", path));
  }
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return SystemError(absl::StrCat("cannot open ", path));
  ArenaFolder folder(path, descriptor, -1);
  RETURN_IF_ERROR(CheckFolder(descriptor, path));
  ASSIGN_OR_RETURN(folder.lock_, folder.OpenFile("lock"));
  if (flock(folder.lock_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return SystemError(absl::StrCat("cannot lock ", path));
    return absl::AlreadyExistsError(
        absl::StrCat(Holder(folder.lock_), " keeps its rows in ", path, "; choose another folder"));
  }
  const std::string number = absl::StrCat(getpid());
  if (ftruncate(folder.lock_, 0) == 0) {
    // For the error of a process that is refused.
    [[maybe_unused]] const ssize_t written = pwrite(folder.lock_, number.data(), number.size(), 0);
  }
  return folder;
}

ArenaFolder::~ArenaFolder() {
  // The lock file stays: otherwise two engines could lock two different files.
  if (lock_ >= 0) close(lock_);
  if (folder_ >= 0) close(folder_);
}

absl::StatusOr<int> ArenaFolder::OpenFile(const std::string& name) const {
  const int file = openat(folder_, name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return SystemError(absl::StrCat("cannot open ", path_, "/", name));
  return file;
}

}  // namespace spillway
