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

// A file of an arena's folder whose pages are there before they are touched: a file
// system that is full refuses them, and a touch cannot end the process. Thread-safe.
class ArenaFile {
 public:
  // Opens it, made where there is none.
  static absl::StatusOr<std::unique_ptr<ArenaFile>> Open(const ArenaFolder& folder,
                                                         const std::string& name);
  ~ArenaFile();
  ArenaFile(const ArenaFile&) = delete;
  ArenaFile& operator=(const ArenaFile&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  // To the end of what was ever allocated.
  absl::StatusOr<int64_t> size_bytes() const;
  // By which its file system tells it from another of the same name.
  absl::StatusOr<uint64_t> number() const;

  // Makes the file at least so long; what is new is a hole.
  absl::Status Extend(int64_t bytes);
  // Makes [offset, offset + bytes) part of the file; what is there already keeps its contents,
  // the rest is zero. RESOURCE_EXHAUSTED, naming the file system's folder, changes nothing.
  absl::Status Allocate(int64_t offset, int64_t bytes);
  // Gives the pages back, up to the end of the file; they read as zero. False: they stay.
  bool Discard(int64_t offset, int64_t bytes);

  // What the file system has left; the largest number where it has no limit of its own.
  int64_t free_bytes() const;

 private:
  absl::StatusOr<struct stat> Stat() const;
  ArenaFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  const std::string path_;
  const int descriptor_;
};

}  // namespace spillway
