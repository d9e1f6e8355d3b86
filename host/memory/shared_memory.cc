#include "host/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

absl::Status Failed(const char* call, int64_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat(call, " of ", bytes, " bytes of shared memory: ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t bytes) {
  const int descriptor = memfd_create("spillway", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return Failed("memfd_create", bytes, errno);
  // Allocate the pages now: a page missing later would end the process that touches it.
  const int missing = posix_fallocate(descriptor, 0, bytes);
  if (missing != 0 ||
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const absl::Status status =
        missing != 0 ? Failed("allocation", bytes, missing) : Failed("sealing", bytes, errno);
    close(descriptor);
    return status;
  }
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) {
    const absl::Status status = Failed("mmap", bytes, errno);
    close(descriptor);
    return status;
  }
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(descriptor, {static_cast<std::byte*>(mapped), static_cast<size_t>(bytes)}));
}

SharedMemory::~SharedMemory() {
  munmap(bytes_.data(), bytes_.size());
  close(descriptor_);
}

}  // namespace spillway
