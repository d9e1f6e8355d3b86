#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "host/base/descriptor.h"

namespace spillway {

// Host memory that other processes can map through a file descriptor: a memfd of sealed size, so
// that no process can shrink it while another reads it. Its pages are allocated at the start and
// zero. Share() and IsHeld() are thread-safe.
class SharedMemory {
 public:
  // RESOURCE_EXHAUSTED if the system does not have the memory. REQUIRES: bytes > 0.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Empty after Free().
  std::span<std::byte> bytes() const { return bytes_; }
  // A descriptor for another process, which can map the memory with it. UNAVAILABLE if the system
  // refuses.
  absl::StatusOr<Descriptor> Share();
  // Unmaps the memory and frees its pages, also those that other processes have mapped: there they
  // read as zeros from then on. If such a process writes to them, it allocates them again.
  void Free();
  // Whether another process still has a descriptor from Share(), or a mapping. Always false on a
  // system that cannot tell.
  bool IsHeld() const;

 private:
  SharedMemory(Descriptor file, std::span<std::byte> bytes);

  const Descriptor file_;
  std::span<std::byte> bytes_;
  const int64_t size_;
  std::atomic<bool> shared_ = false;
  const bool can_tell_;  // whether the system says who holds it
};

}  // namespace spillway
