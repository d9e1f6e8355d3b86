#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/arena.h"
#include "host/memory/slab_limit.h"

namespace spillway {

// A page of a pool. The generation changes whenever the page is freed, so that an outdated
// reference is detected and its page is not read.
struct PageRef {
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: no page

  explicit operator bool() const { return generation != 0; }
  friend bool operator==(const PageRef&, const PageRef&) = default;
};

// The states of the pages of pools with the same page_bytes over one arena. A slab is held by one
// of these pools at a time, so they can share them: 8 bytes per page that any of them ever had.
// Thread-safe.
class PageStates {
 public:
  PageStates(Arena* arena, int64_t page_bytes);
  ~PageStates();
  PageStates(const PageStates&) = delete;
  PageStates& operator=(const PageStates&) = delete;

 private:
  friend class PagePool;
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

// Fixed-size, reference-counted pages cut from arena slabs (2 MiB or a multiple). A slab is
// returned to the arena when its last page is freed. 8 bytes of bookkeeping per page are kept for
// the lifetime of the pool. Thread-safe; Data() is wait-free. The use of a stale reference, except
// in Data(), aborts the process: such a bug could give one sequence's rows to another.
class PagePool {
 public:
  // page_bytes is rounded up to a multiple of 64. limit: bounds the slabs of the pools that share
  // it, of this arena; may be null. Arena and limit must outlive the pool. states: of this arena
  // and page_bytes; null: states of its own.
  PagePool(Arena* arena, int64_t page_bytes, SlabLimit* limit = nullptr,
           std::shared_ptr<PageStates> states = nullptr);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Allocates a page with reference count 1, if possible in the slab of `neighbour` and directly
  // after it. Contents are undefined. RESOURCE_EXHAUSTED.
  absl::StatusOr<PageRef> Allocate(PageRef neighbour = {});
  // Takes over, with its contents, a page that an earlier process allocated from a pool of the same
  // page_bytes over the same file. If the page has references already, adds one. DATA_LOSS if the
  // pool cannot have this index. REQUIRES: the arena has restored SlabsOf(index).
  absl::StatusOr<PageRef> Adopt(uint32_t index);
  // The slabs in which a page with this index lies; they may be beyond the arena's end. DATA_LOSS
  // if no pool of this page_bytes uses the index.
  absl::StatusOr<SlabRun> SlabsOf(uint32_t index) const;
  void AddReference(PageRef page);
  // Drops one reference. The last one frees the page.
  void Release(PageRef page);
  bool IsShared(PageRef page) const;

  // The page's memory, 64-byte aligned. Does not move while the page has a reference. nullptr if
  // the reference is stale.
  std::byte* Data(PageRef page) const;

  // Bytes from a page's memory to the end of its extent, the range that a device has registered as
  // one.
  int64_t BytesToExtentEnd(const std::byte* data) const;

  // Copies the contents of one page to another; both belong to this pool.
  void Copy(std::byte* to, const std::byte* from);

  int64_t page_bytes() const { return page_bytes_; }
  // Pages with at least one reference. Wait-free.
  int64_t used_page_count() const;
  // Free pages in slabs that this pool holds already. Wait-free; approximate while another thread
  // allocates or frees.
  int64_t spare_page_count() const;
  // Pages that can still be allocated: spare_page_count(), and the pages of slabs that the arena
  // has free within the limit. Other users of the arena may take these slabs first. If
  // slab_count() > 1, the free slabs may also not adjoin.
  int64_t free_page_count() const;
  // RESOURCE_EXHAUSTED for `what`, which needs needed_pages pages of the pool.
  absl::Status Exhausted(std::string_view what, int64_t needed_pages) const;
  // Pages in one allocation of slab_count() adjacent slabs.
  int64_t pages_per_slab() const;
  // Slabs in one allocation: the fewest of which at most 1/64 stays unused.
  int64_t slab_count() const;

 private:
  struct Impl;
  const int64_t page_bytes_;
  const std::shared_ptr<PageStates> states_;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
