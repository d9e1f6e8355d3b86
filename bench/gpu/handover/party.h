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

// Long, because starting CUDA, and with MPS also a server, takes seconds.
inline constexpr auto kStartTimeout = std::chrono::seconds(60);
// For one step of the other process; a step takes microseconds.
inline constexpr auto kStepTimeout = std::chrono::seconds(10);

// One process's side on the GPU: a stream, a second stream that frees the first, and the shared
// page, pinned. Create everything and load every kernel before anything waits on a stream, because
// an allocation or a load may block until a pending wait ends.
class Party {
 public:
  // Makes the GPU the thread's current device and starts CUDA. `other_lives` says whether the other
  // process still runs. The page must outlive the party. FAILED_PRECONDITION without a driver or
  // any GPU, NOT_FOUND if there is no GPU of this number.
  static absl::StatusOr<Party> Open(int ordinal, SharedPage* page,
                                    std::function<bool()> other_lives);
  Party(Party&& other) noexcept;
  Party& operator=(Party&&) = delete;
  ~Party();

  SharedBlock& shared() const { return **page_; }
  cudaStream_t stream() const { return stream_.get(); }
  const StreamValues& values() const { return values_; }
  // The GPU's addresses of the flags in host memory.
  uint32_t* go() const { return &device_page_->go_word; }
  uint32_t* done() const { return &device_page_->done_word; }
  uint32_t* told() const { return &device_page_->told_word; }

  // Sets the block in GPU memory; Release also writes its flags. null: there is none.
  void SetBlock(DeviceBlock* block) { block_ = block; }
  DeviceBlock* block() const { return block_; }

  // Runs one kernel that expects the counter at `expected`. This loads the kernel.
  absl::Status RunOnce(uint32_t expected);
  // Tries stream memory operations on every flag, because the attribute of some devices denies them
  // although they work. UNIMPLEMENTED if they do not work. REQUIRES: SetBlock was called; all flags
  // are 0, and nothing waits for them yet.
  absl::Status Probe();

  // Waits until the condition holds; see WaitFor.
  absl::Status Wait(std::chrono::nanoseconds timeout, std::string_view what,
                    const std::function<bool()>& condition) const;
  // Waits until the stream has no more work.
  absl::Status WaitForStream(std::chrono::nanoseconds timeout, std::string_view what) const;
  // Tells the other process why this one fails, and writes kPoison to all flags, which frees the
  // streams of both processes. Ends this process if its stream stays blocked.
  void Release(const absl::Status& why);

 private:
  // The flags, which SharedBlock begins with, as plain words: the GPU does not use std::atomic.
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
  // Never waits for a flag, so it can always free stream_.
  cuda::Stream release_stream_;
  FlagWords* device_page_ = nullptr;
  DeviceBlock* block_ = nullptr;
  bool registered_ = false;
};

}  // namespace spillway::bench
