#include "host/memory/host_backing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"
#include "host/memory/topology.h"
#include "tbb/parallel_for.h"
#include "tbb/task_arena.h"

namespace spillway {
namespace {

absl::Status SystemError(std::string_view call, int64_t bytes) {
  return absl::InternalError(
      absl::StrCat(std::string(call), " of ", bytes, " bytes failed: ", std::strerror(errno)));
}

// One private anonymous mapping of address space, slab-aligned, with at least an unused slab on
// both sides, so that the kernel merges it with no other mapping and smaps counts it alone.
class AddressSpace {
 public:
  static absl::StatusOr<AddressSpace> Reserve(int64_t bytes) {
    const size_t total = static_cast<size_t>(bytes + 3 * kSlabBytes);
    void* p = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED && errno == ENOMEM) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no address space for ", bytes,
          " bytes of K/V rows: lower memory.limit, or raise the process's limit (ulimit -v)"));
    }
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

// Writes one byte of every small page.
void TouchSlab(std::byte* slab) {
  constexpr int64_t kSmallPage = 4096;
  volatile std::byte* at = slab;
  for (int64_t i = 0; i < kSlabBytes; i += kSmallPage) at[i] = std::byte{0};
}

// Allocates and maps a file's pages, with their contents. madvise does this by page faults, which
// can take huge pages and run in parallel. If there is no page, it returns an error, where a touch
// would end the process by a signal.
absl::Status PopulateSlab(ArenaFile& file, int64_t offset, std::byte* slab) {
  int failed = 0;
  do {
    failed = madvise(slab, kSlabBytes, MADV_POPULATE_WRITE);
  } while (failed != 0 && errno == EINTR);
  if (failed == 0) return absl::OkStatus();
  // Linux before 5.14: allocate the pages here; their first use maps them.
  if (errno == EINVAL) return file.Allocate(offset, kSlabBytes);
  if (errno == EFAULT || errno == ENOMEM || errno == ENOSPC) {
    return MemoryExhausted(file.path(), kSlabBytes, file.free_bytes());
  }
  return SystemError("madvise", kSlabBytes);
}

// Touches extents in order. Several extents are touched by a thread, ahead of the caller, who
// awaits one after the other.
class Toucher {
 public:
  using TouchSlabs = std::function<absl::Status(std::byte* slab)>;
  // extents must outlive this object. touch: brings one slab into memory.
  Toucher(std::span<const std::span<std::byte>> extents, int thread_count, TouchSlabs touch)
      : extents_(extents), thread_count_(thread_count), touch_(std::move(touch)) {
    if (extents_.size() == 1) {
      Run();
      return;
    }
    // Not a TBB worker: that could be one that waits for the arena's lock, which the caller holds.
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error&) {
      Run();  // not ahead of the caller
    }
  }
  // Extents that were not begun stay untouched.
  ~Toucher() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }
  Toucher(const Toucher&) = delete;
  Toucher& operator=(const Toucher&) = delete;

  // Waits until extent `extent` is touched. If it or one before it failed, returns the error.
  absl::Status Await(size_t extent) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    while (touched_ <= extent && status_.ok()) changed_.Wait(mutex_);
    return touched_ > extent ? absl::OkStatus() : status_;
  }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_) {
    for (const std::span<std::byte> extent : extents_) {
      {
        const MutexLock lock(mutex_);
        if (stopping_) return;
      }
      absl::Status status = Touch(extent);
      const MutexLock lock(mutex_);
      if (status.ok()) {
        ++touched_;
      } else {
        status_ = std::move(status);
      }
      changed_.NotifyOne();
      if (!status_.ok()) return;
    }
  }

  absl::Status Touch(std::span<std::byte> extent) {
    Mutex mutex;
    absl::Status first;
    tbb::task_arena arena(thread_count_);
    arena.execute([&] {
      tbb::parallel_for(int64_t{0}, static_cast<int64_t>(extent.size()) / kSlabBytes,
                        [&](int64_t s) {
                          absl::Status status = touch_(extent.data() + s * kSlabBytes);
                          if (status.ok()) return;
                          const MutexLock lock(mutex);
                          first.Update(status);
                        });
    });
    return first;
  }

  const std::span<const std::span<std::byte>> extents_;
  const int thread_count_;
  const TouchSlabs touch_;
  Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  CondVar changed_;
  size_t touched_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class HostBacking final : public ArenaBacking {
 public:
  HostBacking(AddressSpace space, int numa_node, int touch_thread_count,
              Arena::ExtentObserver observer, std::unique_ptr<ArenaFile> file)
      : space_(std::move(space)),
        numa_node_(numa_node),
        touch_thread_count_(touch_thread_count),
        observer_(std::move(observer)),
        file_(std::move(file)) {}

  ~HostBacking() override {
    if (!observer_.released) return;
    for (const std::span<std::byte> extent : extents_) observer_.released(extent);
  }

  std::byte* base() const override { return space_.base(); }

  absl::Status Commit(std::span<const std::span<std::byte>> extents, size_t& done) override {
    absl::Status status = Restore(extents, done);
    if (!status.ok()) {
      std::byte* const end = extents.back().data() + extents.back().size();
      Forget({extents[done].data(), end});
    }
    return status;
  }

  absl::Status Restore(std::span<const std::span<std::byte>> extents, size_t& done) override {
    done = 0;
    std::byte* const end = extents.back().data() + extents.back().size();
    absl::Status status = Prepare({extents.front().data(), end});
    if (status.ok()) {
      Toucher toucher(extents, touch_thread_count_, [this](std::byte* slab) {
        if (file_ != nullptr) return PopulateSlab(*file_, slab - base(), slab);
        TouchSlab(slab);
        return absl::OkStatus();
      });
      for (; done < extents.size(); ++done) {
        status = toucher.Await(done);
        if (status.ok() && observer_.committed) status = observer_.committed(extents[done]);
        if (!status.ok()) break;
        extents_.push_back(extents[done]);
      }
    }
    if (!status.ok()) Unmap({extents[done].data(), end});
    return status;
  }

  bool Release(std::span<std::byte> memory) override {
    const auto extent = std::find_if(extents_.begin(), extents_.end(), [&](const auto& extent) {
      return extent.data() == memory.data() && extent.size() == memory.size();
    });
    assert(extent != extents_.end());
    if (observer_.released) observer_.released(memory);
    extents_.erase(extent);
    Unmap(memory);
    Forget(memory);
    return true;
  }

  void Copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  void Forget(std::span<std::byte> memory) override {
    if (file_ != nullptr) file_->Discard(OffsetOf(memory), static_cast<int64_t>(memory.size()));
  }
  int64_t free_bytes() const override {
    return file_ == nullptr ? ArenaBacking::free_bytes() : file_->free_bytes();
  }
  std::string limited_by() const override {
    return file_ == nullptr ? "" : absl::StrCat("the file system of ", file_->path());
  }

 private:
  int64_t OffsetOf(std::span<std::byte> memory) const { return memory.data() - base(); }
  // Makes the memory ready to be touched.
  absl::Status Prepare(std::span<std::byte> memory) const;
  static void Unmap(std::span<std::byte> memory);

  const AddressSpace space_;
  const int numa_node_;
  const int touch_thread_count_;
  const Arena::ExtentObserver observer_;
  const std::unique_ptr<ArenaFile> file_;  // may be null
  std::vector<std::span<std::byte>> extents_;
};

absl::Status HostBacking::Prepare(std::span<std::byte> memory) const {
  const int64_t bytes = static_cast<int64_t>(memory.size());
  if (file_ != nullptr) {
    if (mmap(memory.data(), memory.size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             file_->descriptor(), OffsetOf(memory)) == MAP_FAILED) {
      // hugetlbfs reserves pages when they are mapped.
      return errno == ENOMEM ? MemoryExhausted(file_->path(), bytes, file_->free_bytes())
                             : SystemError("mmap", bytes);
    }
    RETURN_IF_ERROR(file_->Extend(OffsetOf(memory) + bytes));
  } else if (mprotect(memory.data(), memory.size(), PROT_READ | PROT_WRITE) != 0) {
    return SystemError("mprotect", bytes);
  }
  // EINVAL: a kernel without huge pages. The statistics count the huge pages.
  if (madvise(memory.data(), memory.size(), MADV_HUGEPAGE) != 0 && errno != EINVAL) {
    return SystemError("madvise", bytes);
  }
  return numa_node_ >= 0 ? BindMemory(memory, numa_node_) : absl::OkStatus();
}

void HostBacking::Unmap(std::span<std::byte> memory) {
  // Maps new address space over it, which frees anonymous pages and removes the binding. If the
  // kernel allows no more mappings, at least the pages are freed.
  if (mmap(memory.data(), memory.size(), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    madvise(memory.data(), memory.size(), MADV_DONTNEED);
  }
}

bool IsHugePageLine(const std::string& line) {
  for (const char* key :
       {"AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}) {
    if (line.starts_with(key)) return true;
  }
  return false;
}

}  // namespace

int64_t HugePageBytes(const std::byte* begin, const std::byte* end) {
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
      inside =
          first >= reinterpret_cast<uintptr_t>(begin) && last <= reinterpret_cast<uintptr_t>(end);
      continue;
    }
    if (!inside || !IsHugePageLine(line)) continue;
    const size_t digits = line.find_first_of("0123456789");
    int64_t kib = 0;
    if (digits != std::string::npos &&
        absl::SimpleAtoi(line.substr(digits, line.find(' ', digits) - digits), &kib)) {
      bytes += kib * 1024;
    }
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateHostBacking(int64_t limit_bytes, int numa_node,
                                                                int thread_count,
                                                                Arena::ExtentObserver observer,
                                                                std::unique_ptr<ArenaFile> file) {
  ASSIGN_OR_RETURN(AddressSpace space, AddressSpace::Reserve(limit_bytes));
  return std::make_unique<HostBacking>(std::move(space), numa_node, thread_count,
                                       std::move(observer), std::move(file));
}

}  // namespace spillway
