#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/arena.h"

namespace spillway {

// A page of a pool. The generation changes whenever the page is freed, so a
// reference kept too long is found out instead of read.
struct PageRef {
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: no page

  explicit operator bool() const { return generation != 0; }
  friend bool operator==(const PageRef&, const PageRef&) = default;
};

// Fixed-size, reference-counted pages cut from arena slabs (2 MiB or a
// multiple). A slab goes back to the arena when its last page is freed; 8
// bytes of bookkeeping a page stay until the pool goes. Thread-safe; Data() is
// wait-free. Using a reference that is stale, other than in Data(), aborts: it
// is a bug that would hand one sequence's rows to another.
class PagePool {
 public:
  // page_bytes is rounded up to 64. The arena outlives the pool.
  PagePool(Arena* arena, int64_t page_bytes);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A page with reference count 1, next to `neighbour` in its slab where that
  // place is free. Contents are undefined. RESOURCE_EXHAUSTED.
  absl::StatusOr<PageRef> Allocate(PageRef neighbour = {});
  // A page that a pool of the same page_bytes over the same file handed out in a process before
  // this one, with its contents: once more where it has a reference already. DATA_LOSS for an
  // index that the pool cannot have. REQUIRES: the arena has restored SlabsOf(index).
  absl::StatusOr<PageRef> Adopt(uint32_t index);
  // The slabs that a page of that index lies in, be it beyond the arena. DATA_LOSS for an index
  // that no pool of this page_bytes gives.
  absl::StatusOr<SlabRun> SlabsOf(uint32_t index) const;
  void AddReference(PageRef page);
  // Drops one reference; the page is freed with the last.
  void Release(PageRef page);
  bool IsShared(PageRef page) const;

  // The page's memory, 64-byte aligned, stable while it has a reference.
  // nullptr if the reference is stale.
  std::byte* Data(PageRef page) const;

  // Bytes from a page's memory to the end of what the arena has committed, and a device
  // registered, together with it.
  int64_t BytesToExtentEnd(const std::byte* data) const;

  // The contents of a page to another, both of this pool.
  void Copy(std::byte* to, const std::byte* from);

  int64_t page_bytes() const { return page_bytes_; }
  // Pages with at least one reference.
  int64_t used_page_count() const;
  // Pages that fit into slabs this pool holds already.
  int64_t spare_page_count() const;
  // Pages that can still be allocated: the spare ones and those of slabs that
  // the arena would give. Another user of the arena may take them first, and
  // where slab_count() > 1 its free slabs may not adjoin.
  int64_t free_page_count() const;
  // RESOURCE_EXHAUSTED for `what`, which needs that many pages of the pool.
  absl::Status Exhausted(std::string_view what, int64_t needed_pages) const;
  // Pages of one allocation of slab_count() adjacent slabs.
  int64_t pages_per_slab() const;
  // Slabs taken at once: as few as leave at most 1/64 of them unused.
  int64_t slab_count() const;

 private:
  struct Impl;
  const int64_t page_bytes_;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
