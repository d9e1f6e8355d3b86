#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace spillway {

// A folder of files that hold rows, so that the rows outlive the process that wrote them. It is
// locked for the lifetime of this object. The folder must be in a file system that keeps files in
// memory (tmpfs, hugetlbfs): elsewhere the system would write every row to a disk. Move-only.
class ArenaFolder {
 public:
  // Creates the folder with mode 0700 if only the last component of the path is missing.
  // INVALID_ARGUMENT if the path is not absolute. FAILED_PRECONDITION if it is not a folder or is
  // on a disk. PERMISSION_DENIED if it belongs to another user or others may write to it.
  // ALREADY_EXISTS, naming the process, if another engine has it locked.
  static absl::StatusOr<ArenaFolder> Open(const std::string& path);
  ArenaFolder(ArenaFolder&& other) noexcept
      : path_(std::move(other.path_)),
        folder_(std::exchange(other.folder_, -1)),
        lock_(std::exchange(other.lock_, -1)) {}
  ArenaFolder& operator=(ArenaFolder&&) = delete;
  ~ArenaFolder();

  const std::string& path() const { return path_; }
  // Opens a file in the folder, and creates it with mode 0600 if it does not exist. The caller owns
  // the descriptor.
  absl::StatusOr<int> OpenFile(const std::string& name) const;

 private:
  ArenaFolder(std::string path, int folder, int lock)
      : path_(std::move(path)), folder_(folder), lock_(lock) {}

  std::string path_;
  int folder_;
  int lock_;
};

}  // namespace spillway
