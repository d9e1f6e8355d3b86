#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace spillway {

// Host memory that other processes can map by a file descriptor: a memfd whose
// size is sealed, so that nobody can cut it while it is read. Its pages exist
// from the start. Zeroed at first.
class SharedMemory {
 public:
  // RESOURCE_EXHAUSTED where the system has not so much. REQUIRES: bytes > 0.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // For others to map; closed with this.
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(int descriptor, std::span<std::byte> bytes)
      : descriptor_(descriptor), bytes_(bytes) {}

  const int descriptor_;
  const std::span<std::byte> bytes_;
};

}  // namespace spillway
