#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/page_index.h"

// What kernels that score one page at a time share: they copy pages to shared memory and store
// bins.
namespace spillway::cuda {

// A block has an SM to itself, because its pages in flight fill the shared memory.
inline constexpr int kScoreThreads = 512;

// Copies a warp's pages to shared memory: the next page is on its way while one is scored. 16-byte
// asynchronous copies of `bytes` from the start of a page. The caller brings kDepth pages before it
// takes the first, then one after each page that it has scored.
class PageRing {
 public:
  static constexpr int kDepth = 2;

  __device__ PageRing(std::byte* memory, int bytes) : memory_(memory), bytes_(bytes) {}
  // Starts the copy of a page. Null: copies nothing, but counts as a page.
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

// Stores kNoBin for the tokens of pages without scored tokens, by `threads` threads.
__device__ inline void MarkUnscoredPages(const UnitRequest& u, int64_t thread, int64_t threads) {
  const int64_t before = u.scored_page_begin() * kPageTokenCount;
  const int64_t after = u.scored_page_end() * kPageTokenCount;
  const int64_t count = before + max(u.n - after, int64_t{0});
  for (int64_t t = thread; t < count; t += threads) {
    u.bins[t < before ? t : after + (t - before)] = kNoBin;
  }
}

// The norm byte of a token in an index page of a model with a rotation.
__device__ inline uint8_t NormOf(const CodeTiling& tiling, const std::byte* page, int slot) {
  const auto* norms = reinterpret_cast<const uint8_t*>(page) + tiling.norm_offset_bytes();
  return norms[CodeTiling::factor_index(slot)];
}

// The level of a code page. All lanes of the warp call it.
__device__ inline int WarpLevel(const CodeTiling& tiling, const std::byte* page) {
  const auto* norms = reinterpret_cast<const uint32_t*>(page + tiling.norm_offset_bytes());
  return static_cast<int>(
      __reduce_add_sync(kFullWarp, __dp4a(norms[threadIdx.x % 32], 0x01010101u, 0u)));
}

// UsualLevel() of a unit's visible tokens. All lanes of the warp call it.
__device__ inline int WarpUsualLevel(const CodeTiling& tiling, const UnitRequest& u) {
  static_assert(kUsualPagesMax == 32);
  const int lane = threadIdx.x % 32;
  const int64_t index = UsualPage(ClosedPages(u.n), lane);
  const int count = __popc(__ballot_sync(kFullWarp, index >= 0));
  if (count == 0) return 0;
  const auto mine = reinterpret_cast<uintptr_t>(u.code_pages[max(index, int64_t{0})]);
  int own = 0;  // the level of page number `lane`
  for (int first = 0; first < count; first += 16) {
    // Without branches, so that many pages are loaded at once: each takes its latency.
#pragma unroll
    for (int i = first; i < first + 16; ++i) {
      const uintptr_t page = __shfl_sync(kFullWarp, mine, min(i, count - 1));
      const int level = WarpLevel(tiling, reinterpret_cast<const std::byte*>(page));
      if (lane == i) own = level;
    }
  }
  int below = 0;
  for (int i = 0; i < count; ++i) {
    const int level = __shfl_sync(kFullWarp, own, i);
    below += i < lane ? level <= own : level < own;
  }
  const unsigned median = __ballot_sync(kFullWarp, lane < count && below == count / 2);
  return median == 0 ? 0 : __shfl_sync(kFullWarp, own, __ffs(median) - 1);
}

// The bins of a page's tokens, and the slots [begin, end) of its scored tokens.
struct PageSlots {
  uint16_t* bins;
  int begin;
  int end;

  __device__ PageSlots(const UnitRequest& u, int64_t page_index)
      : bins(u.bins + page_index * kPageTokenCount),
        begin(static_cast<int>(max(u.begin - page_index * kPageTokenCount, int64_t{0}))),
        end(static_cast<int>(min(u.end - page_index * kPageTokenCount, int64_t{kPageTokenCount}))) {
  }

  __device__ bool Scored(int slot) const { return slot >= begin && slot < end; }
  // The array of bins has room for whole pages.
  __device__ void Store(int slot, uint32_t bin, uint32_t* histogram) const {
    const bool scored = Scored(slot);
    if (scored) atomicAdd(&histogram[bin], 1u);
    bins[slot] = scored ? static_cast<uint16_t>(bin) : kNoBin;
  }
};

}  // namespace spillway::cuda
