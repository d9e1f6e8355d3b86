#pragma once

#include "gpu/kernels/device_math.cuh"

// What kernels that score a page at a time share: pages on their way in, bins
// on their way out.
namespace spillway::cuda {

// Two blocks an SM: their pages in flight fill its shared memory.
inline constexpr int kScoreThreads = 256;
inline constexpr int kScoreBlocks = 2;

// A warp's pages on their way to shared memory: the next one comes while one
// is scored. 16-byte asynchronous copies; `bytes` from `page` on.
class PageRing {
 public:
  static constexpr int kDepth = 2;

  __device__ PageRing(std::byte* memory, int bytes) : memory_(memory), bytes_(bytes) {}
  // Begins to bring a page; null: none, but the turn is taken.
  __device__ void Bring(const std::byte* page, int lane) {
    if (page != nullptr) {
      const auto to =
          static_cast<uint32_t>(__cvta_generic_to_shared(memory_ + (brought_ % kDepth) * bytes_));
      for (int i = lane * 16; i < bytes_; i += 32 * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(page + i));
      }
    }
    asm volatile("cp.async.commit_group;");
    ++brought_;
  }
  // Waits for the oldest page that was not taken yet.
  __device__ const std::byte* Take() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
    __syncwarp();
    return memory_ + (taken_++ % kDepth) * bytes_;
  }

 private:
  std::byte* const memory_;
  const int bytes_;
  int brought_ = 0;
  int taken_ = 0;
};

__device__ inline void AddToGlobal(const uint32_t* shared_histogram, int bin_count,
                                   uint32_t* histogram) {
  for (int i = threadIdx.x; i < bin_count; i += blockDim.x) {
    const uint32_t count = shared_histogram[i];
    if (count > 0) atomicAdd(&histogram[i], count);
  }
}

// A page's tokens and which of them are scored, by slot.
struct PageSlots {
  uint16_t* bins;
  int begin;
  int end;

  __device__ PageSlots(const UnitRequest& u, int64_t page_index)
      : bins(u.bins + page_index * kPageTokenCount),
        begin(static_cast<int>(max(u.begin - page_index * kPageTokenCount, int64_t{0}))),
        end(static_cast<int>(min(u.end - page_index * kPageTokenCount, int64_t{kPageTokenCount}))) {
  }

  // Bins have room for whole pages.
  __device__ void Store(int slot, uint32_t bin, uint32_t* histogram) const {
    const bool scored = slot >= begin && slot < end;
    if (scored) atomicAdd(&histogram[bin], 1u);
    bins[slot] = scored ? static_cast<uint16_t>(bin) : kNoBin;
  }
};

}  // namespace spillway::cuda
