#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/handover/advance.h"
#include "bench/gpu/handover/shared_page.h"
#include "bench/gpu/handover/stream_values.h"
#include "gpu/cuda/stream.h"

namespace spillway::bench {

// Starting CUDA, and with MPS a server, takes seconds.
inline constexpr auto kStartTimeout = std::chrono::seconds(60);
// For one step of the other process that takes microseconds.
inline constexpr auto kStepTimeout = std::chrono::seconds(10);

// What both processes have on the GPU: a stream, what frees it, and the page,
// pinned. All is made, and every kernel loaded, before anything waits on a
// stream: allocating or loading beside a pending wait may wait for it.
class Party {
 public:
  // Makes the GPU the thread's current device and starts CUDA. `other_lives`: tells
  // whether the other process does. The page outlives it. FAILED_PRECONDITION
  // without a driver or a GPU, NOT_FOUND without this one.
  static absl::StatusOr<Party> Open(int ordinal, SharedPage* page,
                                    std::function<bool()> other_lives);
  Party(Party&& other) noexcept;
  Party& operator=(Party&&) = delete;
  ~Party();

  SharedBlock& shared() const { return **page_; }
  cudaStream_t stream() const { return stream_.get(); }
  const StreamValues& values() const { return values_; }
  // The host flags as the GPU addresses them.
  uint32_t* go() const { return &device_page_->go_word; }
  uint32_t* done() const { return &device_page_->done_word; }
  uint32_t* told() const { return &device_page_->told_word; }

  // Gives it the block whose flags Release writes too.
  void SetBlock(DeviceBlock* block) { block_ = block; }
  DeviceBlock* block() const { return block_; }

  // Runs one kernel, which finds the counter at `expected`, and so loads it.
  absl::Status RunOnce(uint32_t expected);
  // Tries stream memory operations on every flag: a device's attribute says of
  // some that it cannot, though it can. UNIMPLEMENTED where it cannot. REQUIRES:
  // SetBlock; all flags are 0, and nobody waits for them yet.
  absl::Status Probe();

  // Until the condition holds (see WaitFor).
  absl::Status Wait(std::chrono::nanoseconds timeout, std::string_view what,
                    const std::function<bool()>& condition) const;
  // Until the stream has nothing to do.
  absl::Status WaitForStream(std::chrono::nanoseconds timeout, std::string_view what) const;
  // Tells the other process why this one fails, and frees both streams by writing
  // what satisfies every wait. Ends this process where that does not help.
  void Release(const absl::Status& why);

 private:
  // The first words of SharedBlock, which a GPU need not take for atomics.
  struct FlagWords {
    alignas(128) uint32_t go_word;
    alignas(128) uint32_t done_word;
    alignas(128) uint32_t told_word;
  };

  Party(SharedPage* page, std::function<bool()> other_lives, StreamValues values)
      : page_(page), other_lives_(std::move(other_lives)), values_(values) {}

  SharedPage* page_;
  std::function<bool()> other_lives_;
  StreamValues values_;
  cuda::Stream stream_;
  // Nothing on it ever waits.
  cuda::Stream release_stream_;
  FlagWords* device_page_ = nullptr;
  DeviceBlock* block_ = nullptr;
  bool registered_ = false;
};

}  // namespace spillway::bench
