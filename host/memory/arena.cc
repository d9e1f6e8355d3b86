#include "host/memory/arena.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"
#include "host/memory/host_backing.h"
#include "host/memory/topology.h"

namespace spillway {
namespace {

constexpr int64_t kSlabCountMax = std::numeric_limits<int64_t>::max() / kSlabBytes;
// Most slabs in one extent.
constexpr int64_t kExtentSlabsMax = (int64_t{64} << 20) / kSlabBytes;
// Most slabs committed at a time: several extents, so that one is touched while a device registers
// the one before it.
constexpr int64_t kStepSlabsMax = 4 * kExtentSlabsMax;

int64_t RoundDown(int64_t bytes) { return std::max<int64_t>(bytes, 0) / kSlabBytes * kSlabBytes; }

absl::Status CheckSizes(const ArenaOptions& options) {
  if (RoundDown(options.limit_bytes) <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena limit of ", options.limit_bytes,
                                                   " bytes is below one slab of ", kSlabBytes));
  }
  if (options.extent_bytes <= 0 || options.extent_bytes % kSlabBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena extent of ", options.extent_bytes,
                                                   " bytes is not a positive multiple of ",
                                                   kSlabBytes));
  }
  return absl::OkStatus();
}

}  // namespace

// Sizes and positions are in slabs; positions are counted from the base.
struct Arena::Impl {
  Impl(const ArenaOptions& options, MemoryBudget* budget, std::unique_ptr<ArenaBacking> backing)
      : slab_capacity(options.limit_bytes / kSlabBytes),
        extent_slabs(options.extent_bytes / kSlabBytes),
        ready_slabs(std::min(options.ready_bytes / kSlabBytes, slab_capacity)),
        budget(budget),
        backing(std::move(backing)),
        reclaim(budget->AddReclaim([this](int64_t bytes) { GiveBack(bytes); })) {}
  ~Impl() { budget->RemoveReclaim(reclaim); }

  // Memory that was committed together, and is given back together.
  struct Extent {
    int64_t slab_count = 0;
    int64_t free_count = 0;
    MemoryReservation reservation;
  };
  using Extents = std::map<int64_t, Extent>;  // by first slab

  std::byte* At(int64_t slab) const { return backing->base() + slab * kSlabBytes; }
  // Commits what is missing for a run of slab_count free slabs: at least `step` slabs, where
  // address space and budget allow it.
  absl::Status Grow(int64_t slab_count, int64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status Grow(int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return Grow(slab_count, std::max(extent_slabs, committed_count / 256));
  }
  // Commits `least` to `most` slabs at `first`, as many as budget and backing have.
  absl::Status Commit(int64_t first, int64_t least, int64_t most)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Commits extents at `first`, as far as the backing has memory. kept: with the contents of an
  // earlier process. reservation: of all `count` slabs.
  absl::Status CommitExtents(int64_t first, int64_t count, bool kept,
                             MemoryReservation& reservation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Takes slabs from the lowest free run that is long enough; null if there is none.
  std::byte* TakeRun(int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void GiveRun(int64_t first, int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Counts slabs that become free (sign 1) or are taken (-1).
  void CountFree(int64_t first, int64_t slab_count, int sign) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Removes slabs that are free from free_runs.
  void CutRun(int64_t first, int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Gives back the last extent without allocated slabs. Returns its slabs; 0 if there is none, it
  // has more than `most`, or the backing keeps it.
  int64_t GiveBackOne(int64_t most = kSlabCountMax) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Gives back extents of so many bytes, as long as kept_slabs stay committed.
  void GiveBack(int64_t bytes, int64_t kept_slabs = 0) ABSL_LOCKS_EXCLUDED(mutex);
  int64_t FreeBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status Exhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes) const;

  const int64_t slab_capacity;
  const int64_t extent_slabs;
  const int64_t ready_slabs;
  MemoryBudget* const budget;
  const std::unique_ptr<ArenaBacking> backing;
  const std::list<MemoryBudget::Reclaim>::iterator reclaim;

  mutable Mutex mutex;
  Extents extents ABSL_GUARDED_BY(mutex);
  int64_t committed_count ABSL_GUARDED_BY(mutex) = 0;
  int64_t free_count ABSL_GUARDED_BY(mutex) = 0;  // of the committed slabs
  int64_t idle_count ABSL_GUARDED_BY(mutex) = 0;  // in extents without an allocated slab
  // The least value of idle_count since GiveBackIdle.
  int64_t idle_count_min ABSL_GUARDED_BY(mutex) = 0;
  // Runs of free committed slabs: first slab -> number of slabs. No two runs adjoin.
  std::map<int64_t, int64_t> free_runs ABSL_GUARDED_BY(mutex);
};

absl::Status Arena::Impl::Grow(int64_t slab_count, int64_t step) {
  // Look at the gaps between extents and after the last one. A run may begin with free slabs before
  // a gap and end with those after it.
  int64_t gap = 0;
  for (auto extent = extents.begin(); gap < slab_capacity; ++extent) {
    const int64_t end = extent == extents.end() ? slab_capacity : extent->first;
    if (gap < end) {
      const auto next = free_runs.lower_bound(gap);
      int64_t before = 0, after = 0;
      if (next != free_runs.end() && next->first == end) after = next->second;
      if (next != free_runs.begin()) {
        const auto [first, count] = *std::prev(next);
        if (first + count == gap) before = count;
      }
      // At least one slab: Expect() asks for more even if there are free slabs before the gap.
      const int64_t missing = std::clamp<int64_t>(slab_count - before, 1, end - gap);
      if (before + missing + after >= slab_count) {
        absl::Status status = Commit(gap, missing, std::min(end - gap, std::max(step, missing)));
        // Another gap may need fewer slabs.
        if (status.ok() || !absl::IsResourceExhausted(status)) return status;
      }
    }
    if (extent == extents.end()) break;
    gap = extent->first + extent->second.slab_count;
  }
  return Exhausted("the arena", slab_count * kSlabBytes, FreeBytes());
}

absl::Status Arena::Impl::Commit(int64_t first, int64_t least, int64_t most) {
  const int64_t free_bytes = std::min(budget->free_bytes(), backing->free_bytes());
  int64_t count = std::clamp(free_bytes / kSlabBytes, least, most);
  const auto reserve = [&] {
    return budget->Reserve(count * kSlabBytes, "an arena extent", MemoryUse::kPages);
  };
  absl::StatusOr<MemoryReservation> reservation = reserve();
  if (!reservation.ok() && count > least) {
    // Another user of the budget took memory in between.
    count = least;
    reservation = reserve();
  }
  if (!reservation.ok()) return reservation.status();
  return CommitExtents(first, count, /*kept=*/false, *reservation);
}

absl::Status Arena::Impl::CommitExtents(int64_t first, int64_t count, bool kept,
                                        MemoryReservation& reservation) {
  std::vector<std::span<std::byte>> parts;
  for (int64_t at = 0; at < count; at += kExtentSlabsMax) {
    const int64_t slabs = std::min(count - at, kExtentSlabsMax);
    parts.emplace_back(At(first + at), static_cast<size_t>(slabs * kSlabBytes));
  }
  size_t done = 0;
  absl::Status status = kept ? backing->Restore(parts, done) : backing->Commit(parts, done);
  // Extents that were committed are kept, also after an error.
  for (size_t i = 0; i < done; ++i) {
    const auto bytes = static_cast<int64_t>(parts[i].size());
    const int64_t slabs = bytes / kSlabBytes;
    extents.emplace(first, Extent{slabs, 0, reservation.Split(bytes)});
    committed_count += slabs;
    GiveRun(first, slabs);
    first += slabs;
  }
  return status;
}

void Arena::Impl::CountFree(int64_t first, int64_t slab_count, int sign) {
  free_count += sign * slab_count;
  const int64_t end = first + slab_count;
  for (auto extent = std::prev(extents.upper_bound(first)); first < end; ++extent) {
    Extent& c = extent->second;
    const int64_t here = std::min(end, extent->first + c.slab_count) - first;
    if (c.free_count == c.slab_count) idle_count -= c.slab_count;
    c.free_count += sign * here;
    if (c.free_count == c.slab_count) idle_count += c.slab_count;
    first += here;
  }
  idle_count_min = std::min(idle_count_min, idle_count);
}

void Arena::Impl::CutRun(int64_t first, int64_t slab_count) {
  const auto run = std::prev(free_runs.upper_bound(first));
  const int64_t begin = run->first, end = run->first + run->second;
  assert(begin <= first && first + slab_count <= end);
  free_runs.erase(run);
  if (begin < first) free_runs.emplace(begin, first - begin);
  if (first + slab_count < end) free_runs.emplace(first + slab_count, end - first - slab_count);
}

std::byte* Arena::Impl::TakeRun(int64_t slab_count) {
  const auto run = std::find_if(free_runs.begin(), free_runs.end(),
                                [&](const auto& run) { return run.second >= slab_count; });
  if (run == free_runs.end()) return nullptr;
  const int64_t first = run->first;
  CutRun(first, slab_count);
  CountFree(first, slab_count, -1);
  return At(first);
}

void Arena::Impl::GiveRun(int64_t first, int64_t slab_count) {
  CountFree(first, slab_count, +1);
  auto next = free_runs.lower_bound(first);
  assert(next == free_runs.end() || first + slab_count <= next->first);
  if (next != free_runs.end() && next->first == first + slab_count) {
    slab_count += next->second;
    next = free_runs.erase(next);
  }
  if (next != free_runs.begin()) {
    const auto previous = std::prev(next);
    assert(previous->first + previous->second <= first);
    if (previous->first + previous->second == first) {
      previous->second += slab_count;
      return;
    }
  }
  free_runs.emplace_hint(next, first, slab_count);
}

int64_t Arena::Impl::GiveBackOne(int64_t most) {
  if (idle_count == 0) return 0;
  const auto last = std::find_if(extents.rbegin(), extents.rend(), [](const auto& extent) {
    return extent.second.free_count == extent.second.slab_count;
  });
  const int64_t first = last->first;
  const int64_t slab_count = last->second.slab_count;
  if (slab_count > most) return 0;
  if (!backing->Release({At(first), static_cast<size_t>(slab_count * kSlabBytes)})) return 0;
  CutRun(first, slab_count);
  CountFree(first, slab_count, -1);
  committed_count -= slab_count;
  extents.erase(first);
  return slab_count;
}

void Arena::Impl::GiveBack(int64_t bytes, int64_t kept_slabs) {
  while (bytes > 0) {
    // One extent at a time: an append may take a slab in between.
    const MutexLock lock(mutex);
    const int64_t given = GiveBackOne(committed_count - kept_slabs);
    if (given == 0) return;
    bytes -= given * kSlabBytes;
  }
}

int64_t Arena::Impl::FreeBytes() const {
  const int64_t growth =
      std::min(slab_capacity - committed_count,
               std::min(budget->free_bytes(), backing->free_bytes()) / kSlabBytes);
  return (free_count + std::max<int64_t>(growth, 0)) * kSlabBytes;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options,
                                                     MemoryBudget* budget, ExtentObserver observer,
                                                     std::unique_ptr<ArenaFile> file) {
  RETURN_IF_ERROR(CheckSizes(options));
  ASSIGN_OR_RETURN(Topology topology, DetectTopology());
  const int node_count = static_cast<int>(topology.numa_nodes.size());
  if (options.numa_node < -1 || options.numa_node >= node_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("NUMA node ", options.numa_node, " is not in [-1, ", node_count, ")"));
  }
  int threads = options.touch_thread_count;
  if (threads <= 0) {
    threads = options.numa_node < 0 ? topology.core_count
                                    : topology.numa_nodes[options.numa_node].core_count;
  }
  ASSIGN_OR_RETURN(std::unique_ptr<ArenaBacking> backing,
                   CreateHostBacking(RoundDown(options.limit_bytes), options.numa_node,
                                     std::max(threads, 1), std::move(observer), std::move(file)));
  return Create(options, budget, std::move(backing));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options,
                                                     MemoryBudget* budget,
                                                     std::unique_ptr<ArenaBacking> backing) {
  RETURN_IF_ERROR(CheckSizes(options));
  return std::unique_ptr<Arena>(
      new Arena(std::make_unique<Impl>(options, budget, std::move(backing))));
}

Arena::Arena(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Arena::~Arena() = default;

absl::Status Arena::Restore(std::span<const SlabRun> runs) {
  const MutexLock lock(impl_->mutex);
  Impl& arena = *impl_;
  assert(arena.extents.empty());
  int64_t slab = 0;  // all slabs before it are restored or forgotten
  const auto forget_to = [&](int64_t end) {
    if (slab >= end) return;
    arena.backing->Forget({arena.At(slab), static_cast<size_t>((end - slab) * kSlabBytes)});
  };
  for (const SlabRun& run : runs) {
    assert(slab <= run.first && run.first + run.count <= arena.slab_capacity);
    forget_to(run.first);
    slab = run.first + run.count;
    ASSIGN_OR_RETURN(
        MemoryReservation reservation,
        arena.budget->Reserve(run.count * kSlabBytes, "rows that were kept", MemoryUse::kPages));
    RETURN_IF_ERROR(arena.CommitExtents(run.first, run.count, /*kept=*/true, reservation));
    arena.CutRun(run.first, run.count);
    arena.CountFree(run.first, run.count, -1);
  }
  forget_to(arena.slab_capacity);
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> Arena::AllocateSlabs(int64_t slab_count) {
  assert(slab_count > 0);
  const MutexLock lock(impl_->mutex);
  if (std::byte* base = impl_->TakeRun(slab_count)) return base;
  // Saturated, so that the bytes cannot overflow.
  slab_count = std::min(slab_count, kSlabCountMax);
  absl::Status grown = impl_->Grow(slab_count);
  if (absl::IsResourceExhausted(grown) && slab_count > 1 && impl_->GiveBackOne() > 0) {
    // Free slabs that do not adjoin form no run. Give their extents back, to pay for adjacent ones
    // elsewhere.
    while (impl_->GiveBackOne() > 0) {
    }
    grown = impl_->Grow(slab_count);
  }
  if (!grown.ok()) return grown;
  return impl_->TakeRun(slab_count);
}

void Arena::FreeSlabs(std::byte* base, int64_t slab_count) {
  const MutexLock lock(impl_->mutex);
  const int64_t offset = base - impl_->backing->base();
  assert(offset >= 0 && offset % kSlabBytes == 0);
  assert(offset / kSlabBytes + slab_count <= impl_->slab_capacity);
  impl_->GiveRun(offset / kSlabBytes, slab_count);
}

void Arena::Expect(int64_t bytes) {
  const int64_t wanted = std::min((bytes + kSlabBytes - 1) / kSlabBytes, impl_->slab_capacity);
  for (;;) {
    // Others may allocate between two steps.
    const MutexLock lock(impl_->mutex);
    const int64_t missing = wanted - impl_->free_count;
    if (missing <= impl_->extent_slabs) return;
    if (!impl_->Grow(1, std::min(missing, kStepSlabsMax)).ok()) return;
  }
}

absl::StatusOr<bool> Arena::CommitReady() {
  const MutexLock lock(impl_->mutex);
  const int64_t missing = impl_->ready_slabs - impl_->committed_count;
  if (missing <= 0) return false;
  RETURN_IF_ERROR(impl_->Grow(1, std::min(missing, kExtentSlabsMax)));
  return impl_->committed_count < impl_->ready_slabs;
}

void Arena::GiveBackIdle() {
  // Only a share: a sequence that ends is often followed by the next. Committing again costs the
  // zeroing of pages and, for a GPU, their pinning, as much as the copy of the rows into them.
  constexpr int64_t kShare = 8;
  int64_t slab_count = 0;
  {
    const MutexLock lock(impl_->mutex);
    slab_count = (impl_->idle_count_min + kShare - 1) / kShare;
  }
  impl_->GiveBack(slab_count * kSlabBytes, impl_->ready_slabs);
  const MutexLock lock(impl_->mutex);
  impl_->idle_count_min = impl_->idle_count;
}

absl::Status Arena::Impl::Exhausted(std::string_view what, int64_t needed_bytes,
                                    int64_t free_bytes) const {
  if (backing->free_bytes() < budget->free_bytes()) {
    return MemoryExhausted(
        absl::StrCat(std::string(what), ", limited by ", backing->limited_by(), ","), needed_bytes,
        free_bytes);
  }
  return budget->Exhausted(what, needed_bytes, free_bytes, MemoryUse::kPages);
}

absl::Status Arena::Exhausted(std::string_view what, int64_t needed_bytes,
                              int64_t free_bytes) const {
  return impl_->Exhausted(what, needed_bytes, free_bytes);
}

std::byte* Arena::base() const { return impl_->backing->base(); }

int64_t Arena::slab_capacity() const { return impl_->slab_capacity; }

int64_t Arena::BytesToExtentEnd(const std::byte* at) const {
  const int64_t offset = at - base();
  const MutexLock lock(impl_->mutex);
  const auto after = impl_->extents.upper_bound(offset / kSlabBytes);
  assert(after != impl_->extents.begin());
  const auto& [first, extent] = *std::prev(after);
  assert(offset / kSlabBytes < first + extent.slab_count);
  return (first + extent.slab_count) * kSlabBytes - offset;
}

void Arena::Copy(std::byte* to, const std::byte* from, int64_t bytes) {
  impl_->backing->Copy(to, from, bytes);
}

int64_t Arena::free_bytes() const {
  const MutexLock lock(impl_->mutex);
  return impl_->FreeBytes();
}

int64_t Arena::spare_bytes() const {
  const MutexLock lock(impl_->mutex);
  return impl_->free_count * kSlabBytes;
}

ArenaStatistics Arena::statistics() const {
  ArenaStatistics s;
  s.limit_bytes = impl_->slab_capacity * kSlabBytes;
  {
    const MutexLock lock(impl_->mutex);
    s.committed_bytes = impl_->committed_count * kSlabBytes;
    s.used_bytes = s.committed_bytes - impl_->free_count * kSlabBytes;
  }
  const std::byte* const begin = impl_->backing->base();
  s.huge_page_bytes = HugePageBytes(begin, begin + s.limit_bytes);
  return s;
}

}  // namespace spillway
