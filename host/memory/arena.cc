#include "host/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "host/memory/mutex.h"
#include "host/memory/topology.h"
#include "tbb/parallel_for.h"
#include "tbb/task_arena.h"

namespace spillway {
namespace {

constexpr int64_t kSlabCountMax = std::numeric_limits<int64_t>::max() / kSlabBytes;

int64_t RoundDown(int64_t bytes) { return std::max<int64_t>(bytes, 0) / kSlabBytes * kSlabBytes; }

absl::Status SystemError(std::string_view call, int64_t bytes) {
  return absl::InternalError(
      absl::StrCat(std::string(call), " of ", bytes, " bytes failed: ", std::strerror(errno)));
}

// One private anonymous mapping of address space, slab-aligned, with at least
// a slab of unused space on both sides: so the kernel merges it with no other
// mapping and smaps counts it alone.
class AddressSpace {
 public:
  static absl::StatusOr<AddressSpace> Reserve(int64_t bytes) {
    const size_t total = static_cast<size_t>(bytes + 3 * kSlabBytes);
    void* p = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return SystemError("mmap", bytes);
    return AddressSpace(static_cast<std::byte*>(p), total);
  }
  AddressSpace(AddressSpace&& o) noexcept
      : map_(std::exchange(o.map_, nullptr)), total_(o.total_) {}
  AddressSpace& operator=(AddressSpace&&) = delete;
  ~AddressSpace() {
    if (map_ != nullptr) munmap(map_, total_);
  }
  std::byte* base() const {
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(map_) % kSlabBytes);
    return map_ + kSlabBytes + (misaligned == 0 ? 0 : kSlabBytes - misaligned);
  }

 private:
  AddressSpace(std::byte* map, size_t total) : map_(map), total_(total) {}
  std::byte* map_;
  size_t total_;
};

// Writes one byte of every small page, on thread_count threads.
void Touch(std::span<std::byte> chunk, int thread_count) {
  constexpr int64_t kSmallPage = 4096;
  tbb::task_arena arena(thread_count);
  arena.execute([&] {
    tbb::parallel_for(int64_t{0}, static_cast<int64_t>(chunk.size()) / kSlabBytes, [&](int64_t s) {
      volatile std::byte* slab = chunk.data() + s * kSlabBytes;
      for (int64_t i = 0; i < kSlabBytes; i += kSmallPage) slab[i] = std::byte{0};
    });
  });
}

// AnonHugePages of the mappings that lie in [begin, end).
int64_t HugePageBytes(uintptr_t begin, uintptr_t end) {
  std::ifstream smaps("/proc/self/smaps");
  int64_t bytes = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    uint64_t first = 0, last = 0;
    const size_t dash = line.find('-');
    const size_t space = line.find(' ');
    // A mapping's first line is "first-last perms ..."; the others are
    // "Name:   value kB".
    if (dash != std::string::npos && dash < space &&
        absl::SimpleHexAtoi(line.substr(0, dash), &first) &&
        absl::SimpleHexAtoi(line.substr(dash + 1, space - dash - 1), &last)) {
      inside = first >= begin && last <= end;
      continue;
    }
    constexpr char kKey[] = "AnonHugePages:";
    if (!inside || line.rfind(kKey, 0) != 0) continue;
    const size_t digits = line.find_first_of("0123456789");
    int64_t kib = 0;
    if (digits != std::string::npos &&
        absl::SimpleAtoi(line.substr(digits, line.find(' ', digits) - digits), &kib)) {
      bytes += kib * 1024;
    }
  }
  return bytes;
}

// Host memory; see Arena.
class HostBacking final : public ArenaBacking {
 public:
  HostBacking(AddressSpace space, int numa_node, int touch_thread_count,
              Arena::ChunkObserver observer)
      : space_(std::move(space)),
        numa_node_(numa_node),
        touch_thread_count_(touch_thread_count),
        observer_(std::move(observer)) {}

  ~HostBacking() override {
    if (!observer_.released) return;
    for (const std::span<std::byte> chunk : chunks_) observer_.released(chunk);
  }

  std::byte* base() const override { return space_.base(); }

  absl::Status Commit(std::span<std::byte> memory) override {
    absl::Status status = Prepare(memory);
    if (status.ok()) {
      chunks_.push_back(memory);
    } else {
      Unprepare(memory);
    }
    return status;
  }

  void Copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }

 private:
  absl::Status Prepare(std::span<std::byte> memory) const;
  static void Unprepare(std::span<std::byte> memory);

  const AddressSpace space_;
  const int numa_node_;
  const int touch_thread_count_;
  const Arena::ChunkObserver observer_;
  std::vector<std::span<std::byte>> chunks_;
};

absl::Status HostBacking::Prepare(std::span<std::byte> memory) const {
  const int64_t bytes = static_cast<int64_t>(memory.size());
  if (mprotect(memory.data(), memory.size(), PROT_READ | PROT_WRITE) != 0) {
    return SystemError("mprotect", bytes);
  }
  // EINVAL: a kernel without huge pages. What was obtained shows in the
  // statistics.
  if (madvise(memory.data(), memory.size(), MADV_HUGEPAGE) != 0 && errno != EINVAL) {
    return SystemError("madvise", bytes);
  }
  if (numa_node_ >= 0) {
    if (absl::Status status = BindMemory(memory, numa_node_); !status.ok()) return status;
  }
  Touch(memory, touch_thread_count_);
  return observer_.committed ? observer_.committed(memory) : absl::OkStatus();
}

void HostBacking::Unprepare(std::span<std::byte> memory) {
  // Maps fresh address space over it: frees the pages and forgets the
  // binding. Where the kernel has no mapping to spare, the pages go at least.
  if (mmap(memory.data(), memory.size(), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    madvise(memory.data(), memory.size(), MADV_DONTNEED);
  }
}

absl::Status CheckSizes(const ArenaOptions& options) {
  if (RoundDown(options.limit_bytes) <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena limit of ", options.limit_bytes,
                                                   " bytes is below one slab of ", kSlabBytes));
  }
  if (options.chunk_bytes <= 0 || options.chunk_bytes % kSlabBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena chunk of ", options.chunk_bytes,
                                                   " bytes is not a positive multiple of ",
                                                   kSlabBytes));
  }
  return absl::OkStatus();
}

}  // namespace

struct Arena::Impl {
  Impl(const ArenaOptions& options, MemoryBudget* budget, std::unique_ptr<ArenaBacking> backing)
      : limit_bytes(RoundDown(options.limit_bytes)),
        chunk_bytes(options.chunk_bytes),
        budget(budget),
        backing(std::move(backing)) {}

  std::byte* base() const { return backing->base(); }
  // Commits at least min_bytes more, a whole chunk where limit and budget
  // allow it.
  absl::Status Grow(int64_t min_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // First run of at least slab_count free slabs, by address.
  std::byte* TakeRun(int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void GiveRun(int64_t first, int64_t slab_count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Free slabs at the end of what is committed.
  int64_t TrailingSlabs() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  int64_t FreeBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const int64_t limit_bytes;
  const int64_t chunk_bytes;
  MemoryBudget* const budget;
  const std::unique_ptr<ArenaBacking> backing;

  mutable Mutex mutex;
  std::vector<MemoryReservation> reservations ABSL_GUARDED_BY(mutex);  // of the chunks
  int64_t committed_bytes ABSL_GUARDED_BY(mutex) = 0;
  int64_t free_slab_count ABSL_GUARDED_BY(mutex) = 0;
  // Free runs of committed slabs: first slab -> slabs; no two adjoin.
  std::map<int64_t, int64_t> free_runs ABSL_GUARDED_BY(mutex);
};

absl::Status Arena::Impl::Grow(int64_t min_bytes) {
  const int64_t room = limit_bytes - committed_bytes;
  if (min_bytes > room) return MemoryExhausted("the arena", min_bytes, FreeBytes());
  const int64_t step = std::max(chunk_bytes, RoundDown(committed_bytes / 256));
  int64_t bytes = std::clamp(RoundDown(budget->free_bytes()), min_bytes,
                             std::min(room, std::max(step, min_bytes)));
  absl::StatusOr<MemoryReservation> reservation = budget->Reserve(bytes, "an arena chunk");
  if (!reservation.ok() && bytes > min_bytes) {
    // Somebody else took from the budget in between.
    bytes = min_bytes;
    reservation = budget->Reserve(bytes, "an arena chunk");
  }
  if (!reservation.ok()) return reservation.status();
  const std::span<std::byte> memory(base() + committed_bytes, static_cast<size_t>(bytes));
  if (absl::Status status = backing->Commit(memory); !status.ok()) return status;
  reservations.push_back(*std::move(reservation));
  const int64_t first = committed_bytes / kSlabBytes;
  committed_bytes += bytes;
  GiveRun(first, bytes / kSlabBytes);
  return absl::OkStatus();
}

std::byte* Arena::Impl::TakeRun(int64_t slab_count) {
  for (auto it = free_runs.begin(); it != free_runs.end(); ++it) {
    const auto [first, count] = *it;
    if (count < slab_count) continue;
    free_runs.erase(it);
    if (count > slab_count) free_runs.emplace(first + slab_count, count - slab_count);
    free_slab_count -= slab_count;
    return base() + first * kSlabBytes;
  }
  return nullptr;
}

void Arena::Impl::GiveRun(int64_t first, int64_t slab_count) {
  free_slab_count += slab_count;
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

int64_t Arena::Impl::TrailingSlabs() const {
  if (free_runs.empty()) return 0;
  const auto [first, count] = *free_runs.rbegin();
  return (first + count) * kSlabBytes == committed_bytes ? count : 0;
}

int64_t Arena::Impl::FreeBytes() const {
  return free_slab_count * kSlabBytes +
         RoundDown(std::min(limit_bytes - committed_bytes, budget->free_bytes()));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options,
                                                     MemoryBudget* budget, ChunkObserver observer) {
  if (absl::Status status = CheckSizes(options); !status.ok()) return status;
  absl::StatusOr<Topology> topology = DetectTopology();
  if (!topology.ok()) return topology.status();
  const int node_count = static_cast<int>(topology->numa_nodes.size());
  if (options.numa_node < -1 || options.numa_node >= node_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("NUMA node ", options.numa_node, " is not in [-1, ", node_count, ")"));
  }
  int threads = options.touch_thread_count;
  if (threads <= 0) {
    threads = options.numa_node < 0 ? topology->core_count
                                    : topology->numa_nodes[options.numa_node].core_count;
  }
  absl::StatusOr<AddressSpace> space = AddressSpace::Reserve(RoundDown(options.limit_bytes));
  if (!space.ok()) return space.status();
  return Create(options, budget,
                std::make_unique<HostBacking>(*std::move(space), options.numa_node,
                                              std::max(threads, 1), std::move(observer)));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options,
                                                     MemoryBudget* budget,
                                                     std::unique_ptr<ArenaBacking> backing) {
  if (absl::Status status = CheckSizes(options); !status.ok()) return status;
  return std::unique_ptr<Arena>(
      new Arena(std::make_unique<Impl>(options, budget, std::move(backing))));
}

Arena::Arena(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Arena::~Arena() = default;

absl::StatusOr<std::byte*> Arena::AllocateSlabs(int64_t slab_count) {
  assert(slab_count > 0);
  const MutexLock lock(impl_->mutex);
  if (std::byte* base = impl_->TakeRun(slab_count)) return base;
  // Saturated: a count beyond the limit cannot overflow its bytes.
  const int64_t needed_bytes = std::min(slab_count, kSlabCountMax) * kSlabBytes;
  const int64_t missing_bytes = needed_bytes - impl_->TrailingSlabs() * kSlabBytes;
  if (absl::Status grown = impl_->Grow(missing_bytes); !grown.ok()) {
    if (!absl::IsResourceExhausted(grown)) return grown;
    return MemoryExhausted("the arena", needed_bytes, impl_->FreeBytes());
  }
  return impl_->TakeRun(slab_count);
}

void Arena::FreeSlabs(std::byte* base, int64_t slab_count) {
  const MutexLock lock(impl_->mutex);
  const int64_t offset = base - impl_->base();
  assert(offset >= 0 && offset % kSlabBytes == 0);
  assert(offset + slab_count * kSlabBytes <= impl_->committed_bytes);
  impl_->GiveRun(offset / kSlabBytes, slab_count);
}

std::byte* Arena::base() const { return impl_->base(); }

int64_t Arena::slab_capacity() const { return impl_->limit_bytes / kSlabBytes; }

void Arena::Copy(std::byte* to, const std::byte* from, int64_t bytes) {
  impl_->backing->Copy(to, from, bytes);
}

int64_t Arena::free_bytes() const {
  const MutexLock lock(impl_->mutex);
  return impl_->FreeBytes();
}

ArenaStatistics Arena::statistics() const {
  ArenaStatistics s;
  s.limit_bytes = impl_->limit_bytes;
  {
    const MutexLock lock(impl_->mutex);
    s.committed_bytes = impl_->committed_bytes;
    s.used_bytes = impl_->committed_bytes - impl_->free_slab_count * kSlabBytes;
  }
  const auto begin = reinterpret_cast<uintptr_t>(impl_->base());
  s.huge_page_bytes = HugePageBytes(begin, begin + impl_->limit_bytes);
  return s;
}

}  // namespace spillway
