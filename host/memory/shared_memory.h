#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace spillway {

// Host memory that other processes can map through a file descriptor: a memfd of sealed size, so
// that no process can shrink it while another reads it. Its pages are allocated at the start and
// zero.
class SharedMemory {
 public:
  // RESOURCE_EXHAUSTED if the system does not have the memory. REQUIRES: bytes > 0.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // For other processes to map. The destructor closes it.
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(int descriptor, std::span<std::byte> bytes)
      : descriptor_(descriptor), bytes_(bytes) {}

  const int descriptor_;
  const std::span<std::byte> bytes_;
};

}  // namespace spillway
