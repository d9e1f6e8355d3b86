#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "host/base/descriptor.h"

namespace spillway {

// What a regular file holds.
struct RegularFile {
  std::string text;
  mode_t mode = 0;

  bool operator==(const RegularFile&) const = default;
};

// Reads a file at a path that others may have set up. INVALID_ARGUMENT, with the path, if it cannot
// be read, is not a regular file (a pipe would never end, and a device perhaps neither), or has
// more than bytes_max bytes. Does not wait, except for a network file system.
inline absl::StatusOr<RegularFile> ReadRegularFile(const std::string& path, int64_t bytes_max) {
  const auto wrong = [&path](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  const auto failed = [&] { return wrong(absl::StrCat("cannot be read: ", std::strerror(errno))); };
  // Non-blocking, because opening a pipe would wait for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) return failed();
  if (!S_ISREG(info.st_mode)) return wrong("is not a regular file");
  RegularFile found{{}, info.st_mode};
  const auto size_max = static_cast<size_t>(bytes_max);
  // To its end, not to its size, which may change meanwhile.
  for (;;) {
    constexpr size_t kChunkBytes = 64 << 10;
    const size_t size = found.text.size();
    found.text.resize(std::min(size + kChunkBytes, size_max + 1));
    const ssize_t count = read(file.get(), found.text.data() + size, found.text.size() - size);
    if (count < 0 && errno != EINTR) return failed();
    found.text.resize(size + static_cast<size_t>(std::max<ssize_t>(count, 0)));
    if (count == 0) return found;
    if (found.text.size() > size_max)
      return wrong(absl::StrCat("has more than ", bytes_max, " bytes"));
  }
}

}  // namespace spillway
