#include "engine/snapshot/folder.h"

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
#include "engine/errors.h"
#include "engine/registry.h"
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

absl::Status Busy(const std::string& path, const char* use) {
  return WithReason(absl::AbortedError(absl::StrCat("the snapshot at ", path, " is being ", use,
                                                    " by another call")),
                    Reason::kSnapshotBusy, {{"folder", path}});
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
  if (errno == ENOENT) return SnapshotNotFound(path);
  return SystemError(absl::StrCat("cannot open the folder ", path));
}

// Makes a folder if there is none. The folder `at` may be removed at the same time.
absl::Status MakeFolder(int at, const std::string& name, const std::string& path,
                        Account* account) {
  if (faccessat(at, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) return absl::OkStatus();
  if (account != nullptr) RETURN_IF_ERROR(account->Charge(kFolderBytes));
  if (mkdirat(at, name.c_str(), kFolderMode) == 0) return absl::OkStatus();
  const int error = errno;
  if (account != nullptr) account->Settle(-kFolderBytes);
  if (error == EEXIST) return absl::OkStatus();
  if (error == ENOENT) return Busy(path, "removed");
  return absl::ErrnoToStatus(error, absl::StrCat("cannot make ", path));
}

}  // namespace

absl::Status SnapshotNotFound(const std::string& path) {
  return WithReason(absl::NotFoundError(absl::StrCat("there is no snapshot at ", path)),
                    Reason::kSnapshotNotFound, {{"folder", path}});
}

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
                                                          const std::string& name,
                                                          const std::shared_ptr<Account>& account) {
  return Open(root, name, Use::kSave, account);
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::OpenToLoad(const std::string& root,
                                                          const std::string& name) {
  return Open(root, name, Use::kLoad, nullptr);
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::OpenToRemove(
    const std::string& root, const std::string& name, const std::shared_ptr<Account>& account) {
  return Open(root, name, Use::kRemove, account);
}

absl::StatusOr<SnapshotFolder> SnapshotFolder::Open(const std::string& root,
                                                    const std::string& name, Use use,
                                                    const std::shared_ptr<Account>& account) {
  if (root.empty()) {
    return WithReason(
        absl::FailedPreconditionError(
            "the daemon has no folder for snapshots: set snapshots.folder (--snapshot-folder)"),
        Reason::kNoSnapshotFolder);
  }
  const bool to_save = use == Use::kSave;
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
      if (to_save) RETURN_IF_ERROR(MakeFolder(folder.get(), part, path, account.get()));
      ASSIGN_OR_RETURN(folder, OpenFolder(folder.get(), part, path, O_NOFOLLOW));
    }
  }
  if (flock(folder.get(), (use == Use::kLoad ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return SystemError(absl::StrCat("cannot lock ", path));
    return Busy(path, use == Use::kLoad ? "saved or deleted" : "saved, loaded or deleted");
  }
  struct stat info {};
  if (fstat(folder.get(), &info) != 0 || info.st_nlink == 0) return Busy(path, "deleted");
  SnapshotFolder opened(std::move(folder), std::move(path));
  if (account != nullptr) {
    Descriptor own(fcntl(opened.folder_.get(), F_DUPFD_CLOEXEC, 0));
    if (!own.valid()) return SystemError(absl::StrCat("cannot open ", opened.path_));
    opened.charge_ = std::make_unique<FolderCharge>(account, std::move(own));
  }
  return opened;
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

absl::Status SnapshotFolder::Begin(int64_t byte_count) {
  RETURN_IF_ERROR(Remove(kPartialName));
  if (charge_ != nullptr) RETURN_IF_ERROR(charge_->Add(byte_count));
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

absl::Status SnapshotFolder::Remove(const std::string& name) const {
  if (unlinkat(folder_.get(), name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  return SystemError(absl::StrCat("cannot remove ", PathOf(name)));
}

bool SnapshotFolder::RemoveIfEmpty(const std::string& root, const std::string& name,
                                   const std::shared_ptr<Account>& account) {
  if (root == "/") return false;
  bool removed = false;
  for (std::string path = name; rmdir(absl::StrCat(root, "/", path).c_str()) == 0;) {
    removed = true;
    if (account != nullptr) account->Settle(-kFolderBytes);
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  return removed;
}

}  // namespace spillway
