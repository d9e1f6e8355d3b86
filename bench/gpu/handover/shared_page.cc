#include "bench/gpu/handover/shared_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Checks of the condition before the next check of the clock and of the other process.
constexpr int kSpins = 2048;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

absl::StatusOr<SharedBlock*> Map(int fd) {
  void* const memory =
      mmap(nullptr, SharedPage::bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map shared memory");
  return static_cast<SharedBlock*>(memory);
}

}  // namespace

size_t SharedPage::bytes() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (sizeof(SharedBlock) + page - 1) / page * page;
}

absl::StatusOr<SharedPage> SharedPage::Create() {
  const int fd = memfd_create("handover", MFD_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, "cannot make shared memory");
  if (ftruncate(fd, static_cast<off_t>(bytes())) != 0) {
    absl::Status status = absl::ErrnoToStatus(errno, "cannot make shared memory");
    close(fd);
    return status;
  }
  absl::StatusOr<SharedPage> page = Open(fd);
  if (page.ok()) new (page->block_) SharedBlock();
  return page;
}

absl::StatusOr<SharedPage> SharedPage::Open(int fd) {
  const absl::StatusOr<SharedBlock*> block = Map(fd);
  if (!block.ok()) {
    close(fd);
    return block.status();
  }
  return SharedPage(fd, *block);
}

SharedPage::SharedPage(SharedPage&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), block_(std::exchange(other.block_, nullptr)) {}

SharedPage::~SharedPage() {
  if (block_ != nullptr) munmap(block_, bytes());
  if (fd_ >= 0) close(fd_);
}

void SetFailed(SharedBlock& block, const absl::Status& status) {
  if (block.failing.exchange(1) != 0) return;
  const auto why = status.message();
  const size_t size = std::min(why.size(), sizeof(block.failure) - 1);
  std::memcpy(block.failure, why.data(), size);
  block.failure[size] = '\0';
  block.failed.store(1);
}

absl::Status Failure(const SharedBlock& block) {
  if (block.failed.load() == 0) return absl::OkStatus();
  return absl::AbortedError(block.failure);
}

absl::Status WaitFor(const SharedBlock& block, const std::function<bool()>& other_lives,
                     std::chrono::nanoseconds timeout, std::string_view what,
                     const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (;;) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (condition()) return Failure(block);
      Pause();
    }
    if (absl::Status status = Failure(block); !status.ok()) return status;
    if (!other_lives()) {
      // It may have written the reason just before it ended.
      absl::Status status = Failure(block);
      status.Update(absl::UnavailableError(
          absl::StrCat("the other process ended while this one waited for ", std::string(what))));
      return status;
    }
    if (Clock::now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "waited ", std::chrono::duration<double>(timeout).count(), " s for ", std::string(what)));
    }
  }
}

}  // namespace spillway::bench
