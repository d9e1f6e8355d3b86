#include "daemon/snapshot/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/engine/errors.h"
#include "daemon/engine/registry.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr size_t kPartCountMax = 16;
constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;

absl::Status SystemError(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

absl::Status BadName(const std::string& name, const std::string& wanted) {
  return InvalidField(
      "folder", absl::StrCat("\"", absl::CHexEscape(name.substr(0, 100)), "\" is not ", wanted));
}

absl::Status NoSnapshot(const std::string& path) {
  return WithReason(absl::NotFoundError(absl::StrCat("there is no snapshot at ", path)),
                    "SNAPSHOT_NOT_FOUND", {{"folder", path}});
}

absl::StatusOr<std::vector<std::string>> PartsOf(const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  if (parts.size() > kPartCountMax ||
      !std::all_of(parts.begin(), parts.end(), Registry::IsValidId)) {
    return BadName(name, absl::StrCat("1 to ", kPartCountMax,
                                      " parts [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])? with slashes "
                                      "between, below the daemon's snapshots.folder"));
  }
  return parts;
}

absl::Status CheckPath(const std::string& name) {
  bool good =
      name.starts_with('/') && name.size() < PATH_MAX && name.find('\0') == std::string::npos;
  for (const auto part : absl::StrSplit(name, '/')) good = good && part != "..";
  return good ? absl::OkStatus() : BadName(name, "an absolute path without \"..\"");
}

// Creates the missing folders of a path, each with access only for its user.
absl::Status MakePath(const std::string& path) {
  for (size_t at = path.find('/', 1);; at = path.find('/', at + 1)) {
    const std::string part = path.substr(0, at);
    if (mkdir(part.c_str(), kFolderMode) != 0 && errno != EEXIST) {
      return SystemError(absl::StrCat("cannot make ", part));
    }
    if (at == std::string::npos) return absl::OkStatus();
  }
}

absl::StatusOr<Descriptor> OpenFolder(int at, const std::string& name, const std::string& path,
                                      int flags) {
  Descriptor folder(openat(at, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
  if (folder.valid()) return folder;
  if (errno == ENOENT) return NoSnapshot(path);
  return SystemError(absl::StrCat("cannot open the folder ", path));
}

}  // namespace

absl::Status SnapshotFile::Read(std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t count = read(file_.get(), into.data(), into.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return absl::DataLossError(SystemError(absl::StrCat("cannot read ", path_)).message());
    }
    if (count == 0)
      return absl::DataLossError(absl::StrCat(path_, " is shorter than it was when it was opened"));
    into = into.subspan(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::OpenToSave(const std::string& root,
                                                          const std::string& name) {
  return Open(root, name, true);
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::OpenToLoad(const std::string& root,
                                                          const std::string& name) {
  return Open(root, name, false);
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::Open(const std::string& root,
                                                    const std::string& name, bool to_save) {
  if (root.empty()) {
    return WithReason(
        absl::FailedPreconditionError(
            "the daemon has no folder for snapshots: set snapshots.folder (--snapshot-folder)"),
        "NO_SNAPSHOT_FOLDER");
  }
  Descriptor folder;
  std::string path;
  if (root == "/") {
    RETURN_IF_ERROR(CheckPath(name));
    path = name;
    if (to_save) RETURN_IF_ERROR(MakePath(path));
    ASSIGN_OR_RETURN(folder, OpenFolder(AT_FDCWD, path, path, 0));
  } else {
    ASSIGN_OR_RETURN(const std::vector<std::string> parts, PartsOf(name));
    path = absl::StrCat(root, "/", name);
    if (to_save) RETURN_IF_ERROR(MakePath(root));
    ASSIGN_OR_RETURN(folder, OpenFolder(AT_FDCWD, root, path, 0));
    for (const std::string& part : parts) {
      if (to_save && mkdirat(folder.get(), part.c_str(), kFolderMode) != 0 && errno != EEXIST) {
        return SystemError(absl::StrCat("cannot make ", path));
      }
      ASSIGN_OR_RETURN(folder, OpenFolder(folder.get(), part, path, O_NOFOLLOW));
    }
  }
  if (flock(folder.get(), (to_save ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return SystemError(absl::StrCat("cannot lock ", path));
    return WithReason(
        absl::AbortedError(absl::StrCat("the snapshot at ", path, " is being ",
                                        to_save ? "saved or loaded" : "saved", " by another call")),
        "SNAPSHOT_BUSY", {{"folder", path}});
  }
  return SnapshotFolder(std::move(folder), std::move(path));
}

std::string SnapshotFolder::PathOf(std::string_view name) const {
  return absl::StrCat(path_, "/", std::string(name));
}

absl::StatusOr<SnapshotFile> SnapshotFolder::Open(const std::string& name) const {
  const std::string path = PathOf(name);
  // Non-blocking, because opening a pipe would wait for a writer.
  Descriptor file(
      openat(folder_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid()) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
    if (errno == ELOOP)
      return absl::FailedPreconditionError(absl::StrCat(path, " is a symbolic link"));
    return SystemError(absl::StrCat("cannot open ", path));
  }
  struct stat info {};
  if (fstat(file.get(), &info) != 0) return SystemError(absl::StrCat("cannot read ", path));
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file"));
  }
  return SnapshotFile(std::move(file), path, info.st_size);
}

absl::StatusOr<std::vector<std::string>> SnapshotFolder::List() const {
  // A separate descriptor, because reading moves its position.
  const int fd = openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fd < 0 ? nullptr : fdopendir(fd), closedir);
  if (entries == nullptr) return SystemError(absl::StrCat("cannot list ", path_));
  std::vector<std::string> names;
  while (const dirent* entry = readdir(entries.get())) names.emplace_back(entry->d_name);
  return names;
}

absl::Status SnapshotFolder::Begin() {
  Remove(kPartialName);
  written_ = Descriptor(openat(folder_.get(), kPartialName,
                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode));
  if (written_.valid()) return absl::OkStatus();
  return SystemError(absl::StrCat("cannot make ", PathOf(kPartialName)));
}

absl::Status SnapshotFolder::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(written_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError(absl::StrCat("cannot write ", PathOf(kPartialName)));
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::Status SnapshotFolder::Commit(const std::string& name) {
  if (fsync(written_.get()) != 0) {
    return SystemError(absl::StrCat("cannot write ", PathOf(kPartialName)));
  }
  written_ = Descriptor();
  if (renameat(folder_.get(), kPartialName, folder_.get(), name.c_str()) != 0) {
    return SystemError(absl::StrCat("cannot name ", PathOf(name)));
  }
  return absl::OkStatus();
}

absl::Status SnapshotFolder::Sync() const {
  if (fsync(folder_.get()) == 0) return absl::OkStatus();
  return SystemError(absl::StrCat("cannot write ", path_));
}

void SnapshotFolder::Remove(const std::string& name) const {
  unlinkat(folder_.get(), name.c_str(), 0);
}

}  // namespace spillway
