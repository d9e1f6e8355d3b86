#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace spillway {

// A folder of files that hold rows, so that they outlive the process that wrote them:
// locked for as long as this lives. It lies in a file system that keeps files in memory
// (tmpfs, hugetlbfs): anywhere else each row would be written to a disk some time after.
// Move-only.
class ArenaFolder {
 public:
  // Makes the folder, with mode 0700, where only its last part is missing. INVALID_ARGUMENT
  // for a path that is not absolute, FAILED_PRECONDITION for one that is no folder or lies on a
  // disk, PERMISSION_DENIED for one that is another user's or that others may write to,
  // ALREADY_EXISTS, naming the process, while another engine has it.
  static absl::StatusOr<ArenaFolder> Open(const std::string& path);
  ArenaFolder(ArenaFolder&& other) noexcept
      : path_(std::move(other.path_)),
        folder_(std::exchange(other.folder_, -1)),
        lock_(std::exchange(other.lock_, -1)) {}
  ArenaFolder& operator=(ArenaFolder&&) = delete;
  ~ArenaFolder();

  const std::string& path() const { return path_; }
  // A file in it, made with mode 0600 where there is none. The descriptor is the caller's.
  absl::StatusOr<int> OpenFile(const std::string& name) const;

 private:
  ArenaFolder(std::string path, int folder, int lock)
      : path_(std::move(path)), folder_(folder), lock_(lock) {}

  std::string path_;
  int folder_;
  int lock_;
};

}  // namespace spillway
