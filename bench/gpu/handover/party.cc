#include "bench/gpu/handover/party.h"

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::bench {

absl::StatusOr<Party> Party::Open(int ordinal, SharedPage* page,
                                  std::function<bool()> other_lives) {
  static_assert(offsetof(SharedBlock, go) == offsetof(FlagWords, go_word) &&
                offsetof(SharedBlock, done) == offsetof(FlagWords, done_word) &&
                offsetof(SharedBlock, told) == offsetof(FlagWords, told_word));
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    return absl::FailedPreconditionError("no NVIDIA GPU can be used here");
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(error);
  if (ordinal >= count) {
    return absl::NotFoundError(absl::StrCat("GPU ", ordinal, " is not in [0, ", count, ")"));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaSetDevice(ordinal));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaFree(nullptr));
  ASSIGN_OR_RETURN(const StreamValues values, StreamValues::Load());
  Party party(page, std::move(other_lives), values);
  ASSIGN_OR_RETURN(party.stream_, cuda::Stream::Create());
  ASSIGN_OR_RETURN(party.release_stream_, cuda::Stream::CreateUrgent());
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaHostRegister(&**page, SharedPage::bytes(), cudaHostRegisterMapped));
  party.registered_ = true;
  void* address = nullptr;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaHostGetDevicePointer(&address, &**page, 0));
  party.device_page_ = static_cast<FlagWords*>(address);
  return party;
}

Party::Party(Party&& other) noexcept
    : page_(other.page_),
      other_lives_(std::move(other.other_lives_)),
      values_(other.values_),
      stream_(std::move(other.stream_)),
      release_stream_(std::move(other.release_stream_)),
      device_page_(other.device_page_),
      block_(other.block_),
      registered_(std::exchange(other.registered_, false)) {}

Party::~Party() {
  if (registered_) SPILLWAY_CUDA_REPORT(cudaHostUnregister(&**page_));
}

absl::Status Party::RunOnce(uint32_t expected) {
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      LaunchAdvance({.block = block_, .expected = expected}, stream_.get()));
  return WaitForStream(kStepTimeout, "a first kernel");
}

absl::Status Party::Probe() {
  for (uint32_t* const word : {&block_->go, &block_->done, go(), done(), told()}) {
    for (const cudaStream_t stream : {stream_.get(), release_stream_.get()}) {
      RETURN_IF_ERROR(values_.Write(stream, word, 0));
      RETURN_IF_ERROR(values_.WaitUntilReached(stream, word, 0));
    }
  }
  RETURN_IF_ERROR(WaitForStream(kStepTimeout, "stream memory operations that nothing holds"));
  return Wait(kStepTimeout, "the stream that frees others",
              [this] { return cudaStreamQuery(release_stream_.get()) != cudaErrorNotReady; });
}

absl::Status Party::Wait(std::chrono::nanoseconds timeout, std::string_view what,
                         const std::function<bool()>& condition) const {
  return WaitFor(shared(), other_lives_, timeout, what, condition);
}

absl::Status Party::WaitForStream(std::chrono::nanoseconds timeout, std::string_view what) const {
  cudaError_t error = cudaErrorNotReady;
  RETURN_IF_ERROR(Wait(timeout, what, [&] {
    error = cudaStreamQuery(stream_.get());
    return error != cudaErrorNotReady;
  }));
  return cuda::ToStatus(error, what);
}

void Party::Release(const absl::Status& why) {
  using Clock = std::chrono::steady_clock;
  SetFailed(shared(), why);
  absl::Status status;
  for (const Clock::time_point deadline = Clock::now() + kStepTimeout;;) {
    // Repeats this, because a stream that is freed goes on and may overwrite flags with its own
    // writes.
    SharedBlock& block = shared();
    for (SharedBlock::Word* const word : {&block.go, &block.done, &block.told}) {
      word->store(kPoison);
    }
    if (block_ != nullptr) {
      for (uint32_t* const word : {&block_->go, &block_->done}) {
        status.Update(values_.Write(release_stream_.get(), word, kPoison));
      }
    }
    if (cudaStreamQuery(stream_.get()) != cudaErrorNotReady) return;
    if (!status.ok() || Clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  // A normal exit would run CUDA's cleanup, which waits for the stream.
  std::fprintf(stderr, "spillway-handover-bench: %s; and its stream stays blocked\n",
               std::string(why.message()).c_str());
  _exit(1);
}

}  // namespace spillway::bench
