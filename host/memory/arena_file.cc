#include "host/memory/arena_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"
#include "host/memory/memory_budget.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<ArenaFile>> ArenaFile::Open(const ArenaFolder& folder,
                                                           const std::string& name) {
  ASSIGN_OR_RETURN(const int descriptor, folder.OpenFile(name));
  return std::unique_ptr<ArenaFile>(
      new ArenaFile(absl::StrCat(folder.path(), "/", name), descriptor));
}

ArenaFile::~ArenaFile() { close(descriptor_); }

absl::StatusOr<struct stat> ArenaFile::Stat() const {
  struct stat info {};
  if (fstat(descriptor_, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path_));
  }
  return info;
}

absl::StatusOr<int64_t> ArenaFile::size_bytes() const {
  ASSIGN_OR_RETURN(const struct stat info, Stat());
  return info.st_size;
}

absl::StatusOr<uint64_t> ArenaFile::number() const {
  ASSIGN_OR_RETURN(const struct stat info, Stat());
  return info.st_ino;
}

absl::Status ArenaFile::Extend(int64_t bytes) {
  ASSIGN_OR_RETURN(const int64_t size, size_bytes());
  if (size >= bytes || ftruncate(descriptor_, bytes) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("extension of ", path_, " to ", bytes, " bytes"));
}

absl::Status ArenaFile::Allocate(int64_t offset, int64_t bytes) {
  int failed = 0;
  do {
    failed = fallocate(descriptor_, 0, offset, bytes);
  } while (failed != 0 && errno == EINTR);
  if (failed == 0) return absl::OkStatus();
  if (errno == ENOSPC || errno == ENOMEM) {
    absl::Status status = MemoryExhausted(path_, bytes, free_bytes());
    return status;
  }
  return absl::ErrnoToStatus(errno, absl::StrCat("allocation of ", bytes, " bytes of ", path_));
}

bool ArenaFile::Discard(int64_t offset, int64_t bytes) {
  const absl::StatusOr<int64_t> size = size_bytes();
  if (!size.ok()) return false;
  bytes = std::min(bytes, *size - offset);
  return bytes <= 0 ||
         fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) == 0;
}

int64_t ArenaFile::free_bytes() const {
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  struct statfs system {};
  // A tmpfs without a limit reports 0 blocks.
  if (fstatfs(descriptor_, &system) != 0 || system.f_blocks == 0) return kUnlimited;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<int64_t>(system.f_bavail),
                             static_cast<int64_t>(system.f_bsize), &bytes)) {
    return kUnlimited;
  }
  return bytes;
}

}  // namespace spillway
