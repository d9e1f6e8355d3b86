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
  // Address space reserved, and the most that is ever committed; rounded down
  // to whole slabs.
  int64_t limit_bytes = 0;
  // Committed at a time: this, a multiple of kSlabBytes, or a 256th of what is
  // committed already if that is more. Less where limit or budget leave less.
  int64_t extent_bytes = int64_t{8} << 20;
  // NUMA node to bind to (hwloc logical index); -1: the system's choice.
  int numa_node = -1;
  // Threads that touch a new extent; 0: one per core of the node.
  int touch_thread_count = 0;
};

struct ArenaStatistics {
  int64_t limit_bytes = 0;
  int64_t committed_bytes = 0;  // obtained from the system now
  int64_t used_bytes = 0;       // in slabs that are handed out
  int64_t huge_page_bytes = 0;  // of the mapping, in huge pages, from smaps
};

// Reserved address space of some memory, from which an arena commits extents.
class ArenaBacking {
 public:
  virtual ~ArenaBacking() = default;
  // Slab-aligned; the same for all its life.
  virtual std::byte* base() const = 0;
  // Extents become usable: adjacent memory of whole slabs from base on, not committed
  // now. On an error those before the one that fails; the rest is as before. done: how
  // many. Contents are undefined, but for what a process before this one left there.
  virtual absl::Status Commit(std::span<const std::span<std::byte>> extents, size_t& done) = 0;
  // The same of memory that a process before this one left: also after an error it is there for
  // the next one.
  virtual absl::Status Restore(std::span<const std::span<std::byte>> extents, size_t& done) {
    return Commit(extents, done);
  }
  // The opposite, for one extent. False: this memory is kept.
  virtual bool Release(std::span<std::byte>) { return false; }
  // Between two places of committed memory that do not overlap; done when it
  // returns.
  virtual void Copy(std::byte* to, const std::byte* from, int64_t bytes) = 0;
  // Of memory that is not committed: what a process before this one left there goes.
  virtual void Forget(std::span<std::byte>) {}
  // What can still be committed, for all that this knows of.
  virtual int64_t free_bytes() const { return std::numeric_limits<int64_t>::max(); }
  // What sets that, for refusals: "the file system of /dev/shm/spillway/rows".
  virtual std::string limited_by() const { return ""; }
};

// Adjacent slabs of an arena, counted from its base.
struct SlabRun {
  int64_t first = 0;
  int64_t count = 0;
};

// Memory that pages come from, committed extent by extent and handed out in 2
// MiB-aligned slabs. By default host memory: one private anonymous mapping, or that of a
// file, advised to use huge pages, bound to its NUMA node and touched in parallel.
// Committed memory is charged to the budget. Extents of which nothing is used
// are kept for reuse until the budget asks for them or GiveBackIdle.
// Thread-safe.
class Arena {
 public:
  // Called with every extent after it is committed and before it goes; a
  // device registers it there. A failure of commit refuses the allocation.
  // Both run with the arena locked and must not call it.
  struct ExtentObserver {
    std::function<absl::Status(std::span<std::byte>)> committed;
    std::function<void(std::span<std::byte>)> released;
  };

  // file: what the memory is of; null: anonymous.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options,
                                                       MemoryBudget* budget,
                                                       ExtentObserver observer = {},
                                                       std::unique_ptr<ArenaFile> file = nullptr);
  // Over other memory, of which limit_bytes are reserved; of the options only
  // limit_bytes and extent_bytes matter.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options,
                                                       MemoryBudget* budget,
                                                       std::unique_ptr<ArenaBacking> backing);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits slabs whose contents a process before this one left in the file, and hands them
  // out; all else in the file goes. RESOURCE_EXHAUSTED where they do not fit into limit or
  // budget. REQUIRES: ascending runs that do not overlap; nothing is allocated yet.
  absl::Status Restore(std::span<const SlabRun> runs);
  // slab_count adjacent slabs. RESOURCE_EXHAUSTED with needed and free bytes.
  absl::StatusOr<std::byte*> AllocateSlabs(int64_t slab_count);
  void FreeSlabs(std::byte* base, int64_t slab_count);
  // So much is about to be allocated: commits what lacks in extents as large as
  // that, up to 64 MiB, where each costs a device's registration. Where it cannot, the
  // allocations say so.
  void Expect(int64_t bytes);

  // Gives back to system and budget an eighth of the extents that were free all
  // the time since the last call. For a timer: with one call a second half of
  // what stays free is gone after five.
  void GiveBackIdle();

  // MemoryExhausted() for memory of this arena, naming its budget's limit.
  absl::Status Exhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes) const;

  // First slab; every slab lies in [base, base + slab_capacity() * kSlabBytes).
  std::byte* base() const;
  // Slabs of the limit.
  int64_t slab_capacity() const;
  // Bytes from a place in a slab that is handed out to the end of its extent: what a
  // device has registered as one.
  int64_t BytesToExtentEnd(const std::byte* at) const;
  // Between two places in slabs that are handed out and do not overlap.
  void Copy(std::byte* to, const std::byte* from, int64_t bytes);

  // Bytes that can still be handed out before admission refuses: slabs
  // committed and free, plus what budget and limit still allow.
  int64_t free_bytes() const;
  // Of those, bytes of slabs that are committed.
  int64_t spare_bytes() const;
  ArenaStatistics statistics() const;  // reads /proc/self/smaps

 private:
  struct Impl;
  explicit Arena(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
