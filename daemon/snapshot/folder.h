#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/descriptor.h"

namespace spillway {

// A regular file of a snapshot, open for reading. Movable, not thread-safe.
class SnapshotFile {
 public:
  SnapshotFile(Descriptor file, std::string path, int64_t byte_count)
      : file_(std::move(file)), path_(std::move(path)), byte_count_(byte_count) {}

  const std::string& path() const { return path_; }
  int64_t byte_count() const { return byte_count_; }
  // The next bytes. DATA_LOSS, naming the file, where they are not there or cannot be read.
  absl::Status Read(std::span<std::byte> into);

 private:
  Descriptor file_;
  std::string path_;
  int64_t byte_count_;
};

// The folder of one snapshot, and how its files come and go: what is written is synced
// before it is renamed to its name, so that a file under its name is whole, whatever ends the
// process. Locked against other savers while it is open to save, and against savers while
// it is open to load. Links are not followed to files, and below a root other than "/" not to
// folders either. Not thread-safe.
class SnapshotFolder {
 public:
  // root: an absolute path; "/" lets name be any absolute path, but for parts "..". Under another
  // root name is parts of Registry::IsValidId with slashes between, at most 16.
  // INVALID_ARGUMENT, field "folder", for other names; ABORTED, reason SNAPSHOT_BUSY, where it is
  // locked.
  static absl::StatusOr<SnapshotFolder> OpenToSave(const std::string& root,
                                                   const std::string& name);
  // NOT_FOUND, reason SNAPSHOT_NOT_FOUND, where there is no such folder.
  static absl::StatusOr<SnapshotFolder> OpenToLoad(const std::string& root,
                                                   const std::string& name);

  const std::string& path() const { return path_; }
  std::string PathOf(std::string_view name) const;

  // NOT_FOUND; FAILED_PRECONDITION for what is no regular file.
  absl::StatusOr<SnapshotFile> Open(const std::string& name) const;
  // Names of all that lies in it, in no order.
  absl::StatusOr<std::vector<std::string>> List() const;

  // Writes the file that Commit names, in pieces; one at a time.
  absl::Status Begin();
  absl::Status Write(std::span<const std::byte> bytes);
  // Syncs it and gives it its name, in place of what had it.
  absl::Status Commit(const std::string& name);
  // Makes the names that were given last.
  absl::Status Sync() const;
  void Remove(const std::string& name) const;

 private:
  SnapshotFolder(Descriptor folder, std::string path)
      : folder_(std::move(folder)), path_(std::move(path)) {}
  static absl::StatusOr<SnapshotFolder> Open(const std::string& root, const std::string& name,
                                             bool to_save);

  Descriptor folder_;
  std::string path_;
  Descriptor written_;
};

// The name of what is not finished.
inline constexpr char kPartialName[] = "writing.partial";

}  // namespace spillway
