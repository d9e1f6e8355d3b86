#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spillway::bench {

// How a turn is handed over.
enum class Signal : uint32_t {
  kDeviceFlags,  // stream memory operations on flags in GPU memory
  kHostFlags,    // stream memory operations on flags in pinned host memory
  kPolling,      // kernels write flags in pinned host memory; CPUs poll them and launch
};
inline constexpr Signal kSignals[] = {Signal::kDeviceFlags, Signal::kHostFlags, Signal::kPolling};

// A flag with this value satisfies every wait. Frees a stream that waits for a process that is
// gone.
inline constexpr uint32_t kPoison = 0x7fffffff;
// Whether a flag has reached a round. Compares modulo 2^32, like a stream's wait.
inline bool Reached(uint32_t flag, uint32_t round) {
  return static_cast<int32_t>(flag - round) >= 0;
}

// Shared memory of both processes. Each word is written by one process and read by the other,
// except when a process fails.
struct SharedBlock {
  using Word = std::atomic<uint32_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t));

  // Flags that the GPU also reads and writes.
  alignas(128) Word go;
  alignas(128) Word done;
  alignas(128) Word told;  // written by the runner's stream for the runner's CPU

  // The runner's requests: their number so far, and the content of the last one.
  alignas(128) Word request_count;
  Signal signal;
  bool stop;
  uint32_t first_round;
  uint32_t round_count;
  int64_t work_ns;
  alignas(128) Word round;  // the last round that the runner has finished

  // The peer's answers: whether it is ready for requests, and how many it has finished.
  alignas(128) Word is_ready;
  Word ended_count;
  cudaIpcMemHandle_t block;
  bool mps;
  bool has_stream_values;  // whether its streams have memory operations

  // The first process that fails writes its reason here.
  alignas(128) Word failing;
  Word failed;
  char failure[512];
};

// The shared memory with the block. Both processes map it, and it lasts until both have ended.
// Move-only.
class SharedPage {
 public:
  static absl::StatusOr<SharedPage> Create();
  // Maps the page of a descriptor that this process was started with, and takes ownership of the
  // descriptor.
  static absl::StatusOr<SharedPage> Open(int fd);
  SharedPage(SharedPage&& other) noexcept;
  SharedPage& operator=(SharedPage&&) = delete;
  ~SharedPage();

  SharedBlock& operator*() const { return *block_; }
  SharedBlock* operator->() const { return block_; }
  int fd() const { return fd_; }
  // Size of the mapping: SharedBlock, rounded up to whole pages.
  static size_t bytes();

 private:
  SharedPage(int fd, SharedBlock* block) : fd_(fd), block_(block) {}
  int fd_;
  SharedBlock* block_;
};

// Writes the reason why this process fails, unless the other process has failed before.
void SetFailed(SharedBlock& block, const absl::Status& status);
// OK, or ABORTED with the reason why one of the processes failed.
absl::Status Failure(const SharedBlock& block);

// Spins until the condition holds. DEADLINE_EXCEEDED if it does not hold in time, UNAVAILABLE if
// the other process ends, and Failure(block) if a process fails. `what` says in messages what this
// process waits for.
absl::Status WaitFor(const SharedBlock& block, const std::function<bool()>& other_lives,
                     std::chrono::nanoseconds timeout, std::string_view what,
                     const std::function<bool()>& condition);

}  // namespace spillway::bench
