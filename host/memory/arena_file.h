#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/arena_folder.h"

namespace spillway {

// A file in an arena's folder. Its pages are allocated before they are touched: if the file system
// is full, the allocation fails, and no touch ends the process (SIGBUS). Thread-safe.
class ArenaFile {
 public:
  // Opens the file, and creates it if it does not exist.
  static absl::StatusOr<std::unique_ptr<ArenaFile>> Open(const ArenaFolder& folder,
                                                         const std::string& name);
  ~ArenaFile();
  ArenaFile(const ArenaFile&) = delete;
  ArenaFile& operator=(const ArenaFile&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  // Size of the file: the end of all that was ever allocated.
  absl::StatusOr<int64_t> size_bytes() const;
  // Inode number: tells the file from another of the same name.
  absl::StatusOr<uint64_t> number() const;

  // Makes the file at least `bytes` long. The new part is a hole.
  absl::Status Extend(int64_t bytes);
  // Allocates [offset, offset + bytes) of the file. What exists keeps its contents; the rest is
  // zero. RESOURCE_EXHAUSTED, with the file's path, changes nothing.
  absl::Status Allocate(int64_t offset, int64_t bytes);
  // Frees pages of the file, which then read as zero. A range beyond the end of the file is
  // ignored. Returns false if the pages could not be freed.
  bool Discard(int64_t offset, int64_t bytes);

  // Bytes that the file system has left; the largest number if it has no limit of its own.
  int64_t free_bytes() const;

 private:
  absl::StatusOr<struct stat> Stat() const;
  ArenaFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  const std::string path_;
  const int descriptor_;
};

}  // namespace spillway
