#include "host/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

absl::Status Failed(const char* call, int64_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat(call, " of ", bytes, " bytes of shared memory: ", std::strerror(error)));
}

// Opens the file a second time. Other processes get such descriptors, never the memfd itself: the
// kernel counts who has opened a file, but not the process that created a memfd.
Descriptor OpenAgain(int file) {
  return Descriptor(open(absl::StrCat("/proc/self/fd/", file).c_str(), O_RDWR | O_CLOEXEC));
}

// Tries to take a lease for writing, which the kernel grants only if nobody else has opened or
// mapped the file. Returns 0 or an error number.
int TryLease(int file) {
  const Descriptor own = OpenAgain(file);
  if (!own.valid()) return errno;
  // If a process opens the file before the lease is given back, this signal is sent. It is one that
  // is ignored by default: SIGIO would end the process.
  if (fcntl(own.get(), F_SETSIG, SIGURG) != 0) return errno;
  if (fcntl(own.get(), F_SETLEASE, F_WRLCK) != 0) return errno;
  fcntl(own.get(), F_SETLEASE, F_UNLCK);
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t bytes) {
  Descriptor file(memfd_create("spillway", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return Failed("memfd_create", bytes, errno);
  // Allocate the pages now: a page missing later would end the process that touches it.
  if (const int missing = posix_fallocate(file.get(), 0, bytes); missing != 0) {
    return Failed("allocation", bytes, missing);
  }
  // No user but this one can open the file again through /proc, also not when it is freed.
  if (fchmod(file.get(), S_IRUSR | S_IWUSR) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Failed("sealing", bytes, errno);
  }
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) return Failed("mmap", bytes, errno);
  return std::unique_ptr<SharedMemory>(new SharedMemory(
      std::move(file), {static_cast<std::byte*>(mapped), static_cast<size_t>(bytes)}));
}

SharedMemory::SharedMemory(Descriptor file, std::span<std::byte> bytes)
    : file_(std::move(file)),
      bytes_(bytes),
      size_(static_cast<int64_t>(bytes.size())),
      can_tell_(TryLease(file_.get()) == 0) {}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

absl::StatusOr<Descriptor> SharedMemory::Share() {
  shared_ = true;
  Descriptor other = OpenAgain(file_.get());
  if (other.valid()) return other;
  return absl::UnavailableError(
      absl::StrCat("opening a descriptor of shared memory: ", std::strerror(errno)));
}

void SharedMemory::Free() {
  if (bytes_.empty()) return;
  munmap(bytes_.data(), bytes_.size());
  bytes_ = {};
  // If nobody else has the memory, closing the file is enough.
  if (shared_) fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size_);
}

bool SharedMemory::IsHeld() const {
  return shared_ && can_tell_ && TryLease(file_.get()) == EAGAIN;
}

}  // namespace spillway
