#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/account.h"
#include "engine/snapshot/folder_charge.h"
#include "host/base/descriptor.h"

namespace spillway {

// A regular file of a snapshot, open for reading. Movable, not thread-safe.
class SnapshotFile {
 public:
  SnapshotFile(Descriptor file, std::string path, int64_t byte_count)
      : file_(std::move(file)), path_(std::move(path)), byte_count_(byte_count) {}

  const std::string& path() const { return path_; }
  int64_t byte_count() const { return byte_count_; }
  // Reads the next bytes. DATA_LOSS, naming the file, if they do not exist or cannot be read.
  absl::Status Read(std::span<std::byte> into);

 private:
  Descriptor file_;
  std::string path_;
  int64_t byte_count_;
};

// The folder of one snapshot. A file is synced before it is renamed to its name, so a file under
// its name is always complete, however the process ends. While the folder is open to save, it is
// locked against other saves and loads; while it is open to load, against saves. Symbolic links to
// files are not followed, and below a root other than "/" neither are links to folders. Not
// thread-safe.
class SnapshotFolder {
 public:
  // root: an absolute path. If it is "/", name is any absolute path without a part "..". Otherwise
  // name has at most 16 parts, separated by slashes, each valid for Registry::IsValidId.
  // INVALID_ARGUMENT, field "folder", for other names; FAILED_PRECONDITION, reason
  // NO_SNAPSHOT_FOLDER, for an empty root; ABORTED, reason SNAPSHOT_BUSY, if the folder is locked.
  // account: charged with the folders and files that are made, before they are; null: none.
  // RESOURCE_EXHAUSTED, reason QUOTA_EXHAUSTED.
  static absl::StatusOr<SnapshotFolder> OpenToSave(
      const std::string& root, const std::string& name,
      const std::shared_ptr<Account>& account = nullptr);
  // Errors as OpenToSave, and NOT_FOUND, reason SNAPSHOT_NOT_FOUND, if there is no such folder.
  static absl::StatusOr<SnapshotFolder> OpenToLoad(const std::string& root,
                                                   const std::string& name);
  // Errors as OpenToLoad; locked as for a save. account: as for OpenToSave.
  static absl::StatusOr<SnapshotFolder> OpenToRemove(const std::string& root,
                                                     const std::string& name,
                                                     const std::shared_ptr<Account>& account);

  const std::string& path() const { return path_; }
  std::string PathOf(std::string_view name) const;

  // NOT_FOUND if there is no such file; FAILED_PRECONDITION if it is not a regular file.
  absl::StatusOr<SnapshotFile> Open(const std::string& name) const;
  // The names of all entries, in no particular order.
  absl::StatusOr<std::vector<std::string>> List() const;

  // Begin() starts a file of byte_count bytes, Write() appends to it, and Commit() names it. One
  // file at a time. RESOURCE_EXHAUSTED from Begin(), reason QUOTA_EXHAUSTED.
  absl::Status Begin(int64_t byte_count);
  absl::Status Write(std::span<const std::byte> bytes);
  // Syncs the file and renames it to `name`, replacing any file of that name.
  absl::Status Commit(const std::string& name);
  // Makes the names of committed files durable.
  absl::Status Sync() const;
  // Removes a file, if there is one.
  absl::Status Remove(const std::string& name) const;
  // Removes the folder if it is empty, and then the folders above it, below a root other than "/".
  // Returns whether it removed any. root, name and account: as they were opened.
  static bool RemoveIfEmpty(const std::string& root, const std::string& name,
                            const std::shared_ptr<Account>& account);

 private:
  enum class Use { kSave, kLoad, kRemove };

  SnapshotFolder(Descriptor folder, std::string path)
      : folder_(std::move(folder)), path_(std::move(path)) {}
  static absl::StatusOr<SnapshotFolder> Open(const std::string& root, const std::string& name,
                                             Use use, const std::shared_ptr<Account>& account);

  Descriptor folder_;
  std::string path_;
  std::unique_ptr<FolderCharge> charge_;  // null: there is no account
  Descriptor written_;
};

// NOT_FOUND, reason SNAPSHOT_NOT_FOUND.
absl::Status SnapshotNotFound(const std::string& path);

// The name of a file that is not committed yet.
inline constexpr char kPartialName[] = "writing.partial";

}  // namespace spillway
