#include "gpu/device/shared_heap.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/current_device.h"
#include "gpu/cuda/poll.h"
#include "gpu/cuda/stream.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

// How long a thread polls for a layer's kernels without sleeping. At most lengths, an attend takes
// less.
constexpr std::chrono::microseconds kBusy{500};

// Most threads that may do so at once. If more wait, the others sleep between polls.
int BusyMax() {
  static const int most = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 8);
  return most;
}

}  // namespace

class SharedHeap::Memory final : public SharedDeviceMemory {
 public:
  Memory(SharedHeap* heap, DeviceBuffer buffer, Stream stream, std::string handle)
      : heap_(heap),
        buffer_(std::move(buffer)),
        stream_(std::move(stream)),
        handle_(std::move(handle)) {}
  ~Memory() override {
    {
      const CurrentDevice current(heap_->gpu_.ordinal);
      stream_ = Stream();
    }
    const int64_t bytes = buffer_.bytes();
    heap_->FreeLater(std::move(buffer_), bytes);
  }

  const Device& device() const override { return *heap_->device_; }
  std::span<std::byte> bytes() const override {
    return {buffer_.data(), static_cast<size_t>(buffer_.bytes())};
  }
  const std::string& handle() const override { return handle_; }

  absl::Status Read(const std::byte* from, int64_t stride, int64_t row_bytes, int64_t row_count,
                    std::byte* to) override {
    if (stride == row_bytes) return Copy(to, from, row_bytes * row_count, cudaMemcpyDeviceToHost);
    // CUDA cannot copy with the pitches of the next two cases. Rows that overlap are few bytes.
    if (stride < row_bytes) {
      std::vector<std::byte> reach(static_cast<size_t>((row_count - 1) * stride + row_bytes));
      RETURN_IF_ERROR(
          Copy(reach.data(), from, static_cast<int64_t>(reach.size()), cudaMemcpyDeviceToHost));
      for (int64_t row = 0; row < row_count; ++row) {
        std::memcpy(to + row * row_bytes, reach.data() + row * stride,
                    static_cast<size_t>(row_bytes));
      }
      return absl::OkStatus();
    }
    if (stride > std::numeric_limits<int32_t>::max()) {
      for (int64_t row = 0; row < row_count; ++row) {
        RETURN_IF_ERROR(
            Copy(to + row * row_bytes, from + row * stride, row_bytes, cudaMemcpyDeviceToHost));
      }
      return absl::OkStatus();
    }
    const MutexLock lock(mutex_);
    const CurrentDevice current(heap_->gpu_.ordinal);
    RETURN_IF_ERROR(current.status());
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpy2DAsync(to, static_cast<size_t>(row_bytes), from, static_cast<size_t>(stride),
                          static_cast<size_t>(row_bytes), static_cast<size_t>(row_count),
                          cudaMemcpyDeviceToHost, stream_.get()));
    return ToStatus(cudaStreamSynchronize(stream_.get()), "a copy out of shared memory");
  }
  absl::Status Write(std::byte* to, const std::byte* from, int64_t bytes) override {
    return Copy(to, from, bytes, cudaMemcpyHostToDevice);
  }

 private:
  absl::Status Copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    const MutexLock lock(mutex_);
    const CurrentDevice current(heap_->gpu_.ordinal);
    RETURN_IF_ERROR(current.status());
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_.get()));
    return ToStatus(cudaStreamSynchronize(stream_.get()), "a copy of shared memory");
  }

  SharedHeap* const heap_;
  DeviceBuffer buffer_;
  Mutex mutex_;
  Stream stream_ ABSL_GUARDED_BY(mutex_);
  const std::string handle_;
};

class SharedHeap::Exchange final : public DeviceExchange {
 public:
  Exchange(SharedHeap* heap, std::unique_ptr<SharedDeviceMemory> shared, DeviceBuffer inputs,
           Stream stream)
      : heap_(heap),
        shared_(std::move(shared)),
        inputs_(std::move(inputs)),
        stream_(std::move(stream)) {}
  ~Exchange() override {
    {
      const CurrentDevice current(heap_->gpu_.ordinal);
      SPILLWAY_CUDA_REPORT(cudaStreamSynchronize(stream_.get()));
      stream_ = Stream();
    }
    heap_->FreeLater(std::move(inputs_), 0);
  }

  const SharedDeviceMemory& shared() const override { return *shared_; }
  void* stream() const override { return stream_.get(); }
  std::byte* inputs() const override { return inputs_.data(); }
  absl::Status TakeInputs(int64_t bytes) override {
    const CurrentDevice current(heap_->gpu_.ordinal);
    RETURN_IF_ERROR(current.status());
    return ToStatus(
        cudaMemcpyAsync(inputs_.data(), shared_->bytes().data(), static_cast<size_t>(bytes),
                        cudaMemcpyDeviceToDevice, stream_.get()),
        "cudaMemcpyAsync");
  }
  absl::Status Await() override {
    const CurrentDevice current(heap_->gpu_.ordinal);
    RETURN_IF_ERROR(current.status());
    const bool may = heap_->busy_count_.fetch_add(1) < BusyMax();
    const cudaError_t error = Poll([this] { return cudaStreamQuery(stream_.get()); },
                                   may ? kBusy : std::chrono::microseconds(0), [] {});
    heap_->busy_count_.fetch_sub(1);
    return ToStatus(error, "a step on the GPU");
  }

 private:
  SharedHeap* const heap_;
  const std::unique_ptr<SharedDeviceMemory> shared_;
  DeviceBuffer inputs_;
  Stream stream_;
};

SharedHeap::~SharedHeap() {
  workers_->execute([this] { frees_.wait(); });
}

absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> SharedHeap::Allocate(int64_t bytes) {
  constexpr int64_t kGranule = SharedDeviceMemory::kGranule;
  constexpr std::string_view kWhat = "memory shared with a client";
  if (bytes > std::numeric_limits<int64_t>::max() - kGranule) {
    return MemoryExhausted(kWhat, bytes, DeviceAllocator::FreeBytes());
  }
  const CurrentDevice current(gpu_.ordinal);
  RETURN_IF_ERROR(current.status());
  ASSIGN_OR_RETURN(Stream stream, Stream::Create());
  ASSIGN_OR_RETURN(DeviceBuffer buffer,
                   DeviceBuffer::Create(RoundUp(bytes, kGranule), budget_, kWhat));
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(buffer.data(), 0, static_cast<size_t>(buffer.bytes()), stream.get()));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream.get()));
  cudaIpcMemHandle_t handle;
  if (const cudaError_t error = cudaIpcGetMemHandle(&handle, buffer.data()); error != cudaSuccess) {
    const absl::Status status = ToStatus(error, "cudaIpcGetMemHandle");
    return absl::UnimplementedError(absl::StrCat(
        std::string(gpu_.name), " shares no memory here: ", std::string(status.message())));
  }
  used_bytes_ += buffer.bytes();
  return std::make_unique<Memory>(
      this, std::move(buffer), std::move(stream),
      std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)));
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> SharedHeap::OpenExchange(int64_t bytes,
                                                                         int64_t input_bytes) {
  ASSIGN_OR_RETURN(std::unique_ptr<SharedDeviceMemory> shared, Allocate(bytes));
  const CurrentDevice current(gpu_.ordinal);
  RETURN_IF_ERROR(current.status());
  ASSIGN_OR_RETURN(DeviceBuffer inputs,
                   DeviceBuffer::Create(input_bytes, budget_, "a step's tensors"));
  ASSIGN_OR_RETURN(Stream stream, Stream::CreateUrgent());
  return std::make_unique<Exchange>(this, std::move(shared), std::move(inputs), std::move(stream));
}

void SharedHeap::FreeLater(DeviceBuffer buffer, int64_t shared_bytes) {
  // In a shared_ptr, because tasks are copied.
  auto freed = std::make_shared<DeviceBuffer>(std::move(buffer));
  workers_->enqueue(frees_.defer([this, freed = std::move(freed), shared_bytes] {
    const CurrentDevice current(gpu_.ordinal);
    *freed = DeviceBuffer();
    used_bytes_ -= shared_bytes;
  }));
}

}  // namespace spillway::cuda
