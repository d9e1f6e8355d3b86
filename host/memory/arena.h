#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/arena_file.h"
#include "host/memory/memory_budget.h"

namespace spillway {

inline constexpr int64_t kSlabBytes = int64_t{2} << 20;

struct ArenaOptions {
  // Address space to reserve, and the most that is ever committed; rounded down to whole slabs.
  int64_t limit_bytes = 0;
  // Bytes to commit at a time, a multiple of kSlabBytes. 1/256 of the committed bytes if that is
  // more; less if the limit or the budget leaves less.
  int64_t extent_bytes = int64_t{8} << 20;
  // CommitReady() commits so many bytes, and GiveBackIdle() leaves as many; no more than
  // limit_bytes.
  int64_t ready_bytes = 0;
  // NUMA node to bind to (hwloc logical index); -1: not bound.
  int numa_node = -1;
  // Threads that touch a new extent; 0: one per core of the node.
  int touch_thread_count = 0;
};

struct ArenaStatistics {
  int64_t limit_bytes = 0;
  int64_t committed_bytes = 0;  // currently obtained from the system
  int64_t used_bytes = 0;       // in slabs that are allocated
  int64_t huge_page_bytes = 0;  // of committed memory, in huge pages; from smaps
};

// Reserved address space of one kind of memory, in which an arena commits extents.
class ArenaBacking {
 public:
  virtual ~ArenaBacking() = default;
  // First byte of the address space. Slab-aligned; never changes.
  virtual std::byte* base() const = 0;
  // Makes extents usable: adjacent whole slabs that are not committed. done: how many were
  // committed; on an error, those before the one that failed. Contents are undefined, except what
  // an earlier process left there.
  virtual absl::Status Commit(std::span<const std::span<std::byte>> extents, size_t& done) = 0;
  // Like Commit() for contents of an earlier process, which are kept even after an error.
  virtual absl::Status Restore(std::span<const std::span<std::byte>> extents, size_t& done) {
    return Commit(extents, done);
  }
  // Undoes Commit() for one extent. Returns false if this kind of memory is never released.
  virtual bool Release(std::span<std::byte>) { return false; }
  // Copies between two ranges of committed memory that do not overlap. Returns when the copy is
  // complete.
  virtual void Copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;
  // Discards what an earlier process left in memory that is not committed.
  virtual void Forget(std::span<std::byte>) {}
  // Bytes that can still be committed, as far as the backing knows.
  virtual int64_t free_bytes() const { return std::numeric_limits<int64_t>::max(); }
  // What limits free_bytes(), for error messages: "the file system of /dev/shm/spillway/rows".
  virtual std::string limited_by() const { return ""; }
};

// Adjacent slabs of an arena, counted from its base.
struct SlabRun {
  int64_t first = 0;
  int64_t count = 0;
};

// The memory from which pages are cut. It is committed extent by extent and handed out in aligned
// slabs of 2 MiB. By default it is host memory: one private anonymous mapping, or that of a file,
// advised to use huge pages, bound to its NUMA node and touched in parallel. Committed memory is
// charged to the budget. Extents without an allocated slab are kept for reuse until the budget
// needs them or GiveBackIdle() releases them. Thread-safe.
class Arena {
 public:
  // Called with every extent: `committed` after it is committed, `released` before it is released.
  // A device registers and unregisters it there. If `committed` fails, so does the allocation. Both
  // run with the arena locked and must not call it.
  struct ExtentObserver {
    std::function<absl::Status(std::span<std::byte>)> committed;
    std::function<void(std::span<std::byte>)> released;
  };

  // file: the file to map; null: anonymous memory.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options,
                                                       MemoryBudget* budget,
                                                       ExtentObserver observer = {},
                                                       std::unique_ptr<ArenaFile> file = nullptr);
  // An arena over other memory, in which limit_bytes are reserved. Of the options, only limit_bytes
  // and extent_bytes are used.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options,
                                                       MemoryBudget* budget,
                                                       std::unique_ptr<ArenaBacking> backing);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits slabs whose contents an earlier process left in the file, and marks them allocated.
  // Discards the rest of the file. RESOURCE_EXHAUSTED if the slabs do not fit into the limit or the
  // budget. REQUIRES: runs are in ascending order and do not overlap; nothing is allocated yet.
  absl::Status Restore(std::span<const SlabRun> runs);
  // Allocates slab_count adjacent slabs. RESOURCE_EXHAUSTED with needed and free bytes.
  absl::StatusOr<std::byte*> AllocateSlabs(int64_t slab_count);
  void FreeSlabs(std::byte* base, int64_t slab_count);
  // Announces that `bytes` will be allocated. Commits missing slabs in extents of up to 64 MiB,
  // because a device registers each one. Returns no error: the allocations report it.
  void Expect(int64_t bytes);

  // Commits up to 64 MiB of what is missing of ready_bytes. Returns whether more is missing.
  // RESOURCE_EXHAUSTED; errors of the observer.
  absl::StatusOr<bool> CommitReady();

  // Gives back to system and budget an eighth of the extents that were free all the time since the
  // last call. For a timer: with one call per second, half of what stays free is gone after five.
  void GiveBackIdle();

  // MemoryExhausted() that names the limit, that of the backing or of the budget.
  absl::Status Exhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes) const;

  // First slab; every slab lies in [base, base + slab_capacity() * kSlabBytes).
  std::byte* base() const;
  // Slabs within the limit.
  int64_t slab_capacity() const;
  // Bytes from `at`, in an allocated slab, to the end of its extent. A device has registered the
  // extent as one range.
  int64_t BytesToExtentEnd(const std::byte* at) const;
  // Copies between two ranges in allocated slabs that do not overlap.
  void Copy(std::byte* to, const std::byte* from, int64_t bytes);

  // Bytes that can still be allocated: slabs that are committed and free, plus what the budget and
  // the limit still allow.
  int64_t free_bytes() const;
  // Of free_bytes(), the bytes in committed slabs.
  int64_t spare_bytes() const;
  ArenaStatistics statistics() const;  // reads /proc/self/smaps

 private:
  struct Impl;
  explicit Arena(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
