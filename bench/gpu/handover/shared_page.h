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
  kHostFlags,    // the same on flags in pinned host memory
  kPolling,      // kernels write flags in pinned host memory, CPUs poll and launch
};
inline constexpr Signal kSignals[] = {Signal::kDeviceFlags, Signal::kHostFlags, Signal::kPolling};

// Satisfies every wait for a flag to reach a round. What frees a stream whose
// peer is gone.
inline constexpr uint32_t kPoison = 0x7fffffff;
// Whether a flag has reached a round, as a stream compares it: cyclically.
inline bool Reached(uint32_t flag, uint32_t round) {
  return static_cast<int32_t>(flag - round) >= 0;
}

// Memory of both processes. One writes a word, the other reads it.
struct SharedBlock {
  using Word = std::atomic<uint32_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t));

  // Flags that GPUs write and read too.
  alignas(128) Word go;
  alignas(128) Word done;
  alignas(128) Word told;  // the runner's stream, to its own CPU

  // The runner's requests: how many there were, and what the last one asks for.
  alignas(128) Word request_count;
  Signal signal;
  bool stop;
  uint32_t first_round;
  uint32_t round_count;
  int64_t work_ns;
  alignas(128) Word round;  // the last that the runner has ended

  // The peer's answers: whether it awaits requests, and how many it has ended.
  alignas(128) Word is_ready;
  Word ended_count;
  cudaIpcMemHandle_t block;
  bool mps;
  bool has_stream_values;  // whether its streams can wait and write

  // Whoever fails says why, once.
  alignas(128) Word failing;
  Word failed;
  char failure[512];
};

// The block, in memory that is mapped by both and lasts as long as either.
// Move-only.
class SharedPage {
 public:
  static absl::StatusOr<SharedPage> Create();
  // Of the descriptor that a process was started with, which it takes over.
  static absl::StatusOr<SharedPage> Open(int fd);
  SharedPage(SharedPage&& other) noexcept;
  SharedPage& operator=(SharedPage&&) = delete;
  ~SharedPage();

  SharedBlock& operator*() const { return *block_; }
  SharedBlock* operator->() const { return block_; }
  int fd() const { return fd_; }
  // Bytes that it takes, whole pages.
  static size_t bytes();

 private:
  SharedPage(int fd, SharedBlock* block) : fd_(fd), block_(block) {}
  int fd_;
  SharedBlock* block_;
};

// Says why this process goes no further, unless the other has failed first.
void SetFailed(SharedBlock& block, const absl::Status& status);
// OK, or why one of the processes failed.
absl::Status Failure(const SharedBlock& block);

// Waits, busily, until the condition holds. DEADLINE_EXCEEDED when it does not in
// time, UNAVAILABLE when the other process ends, and its failure when it fails;
// `what` names what is waited for.
absl::Status WaitFor(const SharedBlock& block, const std::function<bool()>& other_lives,
                     std::chrono::nanoseconds timeout, std::string_view what,
                     const std::function<bool()>& condition);

}  // namespace spillway::bench
