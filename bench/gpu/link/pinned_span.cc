#include "bench/gpu/link/pinned_span.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"
#include "host/memory/arena.h"
#include "host/memory/topology.h"
#include "tbb/parallel_for.h"
#include "tbb/task_arena.h"

namespace spillway::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Registers a chunk for all GPUs, and adds the time that this takes to *seconds.
absl::Status Register(std::span<std::byte> chunk, double* seconds) {
  const Clock::time_point start = Clock::now();
  const cudaError_t error = cudaHostRegister(chunk.data(), chunk.size(),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  *seconds += SecondsSince(start);
  return cuda::ToStatus(error, absl::StrCat("cudaHostRegister of ", chunk.size(), " bytes"));
}

void Unregister(std::span<std::byte> chunk) {
  SPILLWAY_CUDA_REPORT(cudaHostUnregister(chunk.data()));
}

class HostAllocSpan final : public PinnedSpan {
 public:
  explicit HostAllocSpan(cuda::PinnedBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> memory() const override {
    return {buffer_.data(), static_cast<size_t>(buffer_.bytes())};
  }

 private:
  cuda::PinnedBuffer buffer_;
};

// An arena like the daemon's; the span is the whole arena.
class HugePageSpan final : public PinnedSpan {
 public:
  HugePageSpan(std::unique_ptr<Arena> arena, int64_t bytes)
      : arena_(std::move(arena)), bytes_(bytes) {}
  std::span<std::byte> memory() const override {
    return {arena_->base(), static_cast<size_t>(bytes_)};
  }
  int64_t huge_page_bytes() const override { return arena_->statistics().huge_page_bytes; }

 private:
  const std::unique_ptr<Arena> arena_;
  const int64_t bytes_;
};

absl::StatusOr<std::unique_ptr<PinnedSpan>> CreateHugePages(const Allocation& allocation,
                                                            int touch_thread_count,
                                                            MemoryBudget* budget,
                                                            double* register_seconds) {
  ArenaOptions options;
  options.limit_bytes = allocation.bytes;
  options.extent_bytes = kSpanStepBytes;
  options.numa_node = allocation.numa_node;
  // If bound to a node, the arena touches its memory with that node's cores.
  if (allocation.numa_node < 0) options.touch_thread_count = touch_thread_count;
  // All chunks are committed below, so register_seconds is still valid when `committed` runs.
  Arena::ExtentObserver observer;
  observer.committed = [register_seconds](std::span<std::byte> chunk) {
    return Register(chunk, register_seconds);
  };
  observer.released = Unregister;
  absl::StatusOr<std::unique_ptr<Arena>> arena =
      Arena::Create(options, budget, std::move(observer));
  if (!arena.ok()) return arena.status();
  for (int64_t bytes = 0; bytes < allocation.bytes; bytes += kSpanStepBytes) {
    const absl::StatusOr<std::byte*> chunk = (*arena)->AllocateSlabs(kSpanStepBytes / kSlabBytes);
    if (!chunk.ok()) return chunk.status();
    assert(*chunk == (*arena)->base() + bytes);
  }
  return std::make_unique<HugePageSpan>(*std::move(arena), allocation.bytes);
}

// A mapping of 4 KiB pages.
class SmallPageSpan final : public PinnedSpan {
 public:
  SmallPageSpan(std::span<std::byte> map, MemoryReservation reservation)
      : map_(map), reservation_(std::move(reservation)) {}
  ~SmallPageSpan() override {
    for (const std::span<std::byte> chunk : registered_) Unregister(chunk);
    munmap(map_.data(), map_.size());
  }
  std::span<std::byte> memory() const override { return map_; }

  absl::Status Commit(int numa_node, int touch_thread_count, double* register_seconds) {
    // EINVAL: the kernel has no huge pages.
    if (madvise(map_.data(), map_.size(), MADV_NOHUGEPAGE) != 0 && errno != EINVAL) {
      return absl::InternalError(absl::StrCat("madvise: ", std::strerror(errno)));
    }
    if (numa_node >= 0) {
      RETURN_IF_ERROR(BindMemory(map_, numa_node));
    }
    tbb::task_arena threads(touch_thread_count);
    for (size_t at = 0; at < map_.size(); at += kSpanStepBytes) {
      const std::span<std::byte> chunk = map_.subspan(at, kSpanStepBytes);
      threads.execute([chunk] { Touch(chunk); });
      RETURN_IF_ERROR(Register(chunk, register_seconds));
      registered_.push_back(chunk);
    }
    return absl::OkStatus();
  }

 private:
  // Writes one byte of every page.
  static void Touch(std::span<std::byte> chunk) {
    constexpr size_t kPage = 4096;
    constexpr size_t kPart = size_t{2} << 20;
    tbb::parallel_for(size_t{0}, chunk.size() / kPart, [chunk](size_t part) {
      volatile std::byte* const bytes = chunk.data() + part * kPart;
      for (size_t i = 0; i < kPart; i += kPage) bytes[i] = std::byte{0};
    });
  }

  const std::span<std::byte> map_;
  const MemoryReservation reservation_;
  std::vector<std::span<std::byte>> registered_;
};

absl::StatusOr<std::unique_ptr<PinnedSpan>> CreateSmallPages(const Allocation& allocation,
                                                             int touch_thread_count,
                                                             MemoryBudget* budget,
                                                             double* register_seconds) {
  absl::StatusOr<MemoryReservation> reservation = budget->Reserve(allocation.bytes, "the span");
  if (!reservation.ok()) return reservation.status();
  const auto bytes = static_cast<size_t>(allocation.bytes);
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mmap of ", bytes, " bytes: ", std::strerror(errno)));
  }
  auto span = std::make_unique<SmallPageSpan>(std::span(static_cast<std::byte*>(map), bytes),
                                              *std::move(reservation));
  RETURN_IF_ERROR(span->Commit(allocation.numa_node, touch_thread_count, register_seconds));
  return span;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedSpan>> PinnedSpan::Create(const Allocation& allocation,
                                                               int touch_thread_count,
                                                               MemoryBudget* budget) {
  assert(allocation.bytes > 0 && allocation.bytes % kSpanStepBytes == 0);
  const Clock::time_point start = Clock::now();
  double register_seconds = 0;
  absl::StatusOr<std::unique_ptr<PinnedSpan>> span;
  switch (allocation.pinning) {
    case Pinning::kHostAlloc: {
      absl::StatusOr<cuda::PinnedBuffer> buffer =
          cuda::PinnedBuffer::Create(allocation.bytes, budget, "the span");
      if (!buffer.ok()) return buffer.status();
      span = std::make_unique<HostAllocSpan>(*std::move(buffer));
      break;
    }
    case Pinning::kHugePages:
      span = CreateHugePages(allocation, touch_thread_count, budget, &register_seconds);
      break;
    case Pinning::kSmallPages:
      span = CreateSmallPages(allocation, touch_thread_count, budget, &register_seconds);
      break;
  }
  if (!span.ok()) return span;
  (*span)->cost_.seconds = SecondsSince(start);
  if (allocation.pinning != Pinning::kHostAlloc) {
    (*span)->cost_.register_seconds = register_seconds;
  }
  return span;
}

}  // namespace spillway::bench
