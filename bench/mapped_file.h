#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace spillway::bench {

// A file mapped for reading. Move-only.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  MappedFile(const std::byte* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  const std::byte* data_;
  int64_t bytes_;
};

}  // namespace spillway::bench
