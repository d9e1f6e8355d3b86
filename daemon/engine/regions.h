#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/caller.h"
#include "host/base/mutex.h"
#include "host/device/device.h"
#include "host/memory/memory_budget.h"
#include "host/memory/shared_memory.h"

namespace spillway {

// Memory that requests may name instead of carrying bytes. Its holder may write
// to it at any time. Lives on while requests that use it hold it.
struct Region {
  std::string id;
  // Whose callers may name it.
  std::string name_space;
  std::span<std::byte> bytes;
  // Of host memory. Null: not ours, or a GPU's.
  std::unique_ptr<SharedMemory> memory;
  // Of a GPU's memory. Null: not ours, or the host's.
  std::unique_ptr<SharedDeviceMemory> gpu_memory;
  // Memory of a GPU: the host cannot read it.
  bool on_gpu = false;
  MemoryReservation reservation;

  // The GPU whose memory it is; null where that is not known, or it is the host's.
  const Device* gpu() const { return gpu_memory == nullptr ? nullptr : &gpu_memory->device(); }
  // Called once, when nothing can name the region any more. May be null.
  std::function<void()> detached;
};

// The regions of all clients. A client's belong to its session, which ends with
// its process. A session and a region are of the namespace that attached; there, who knows a
// region's id, which cannot be guessed, may use it. Thread-safe.
class RegionTable {
 public:
  // Of one session.
  static constexpr int64_t kRegionCountMax = 256;
  // The name of the whole process's memory where kProcess allows it; offsets in
  // it are addresses.
  static constexpr char kProcessRegion[] = "process";
  // The same of the memory of its GPUs.
  static constexpr char kGpuRegion[] = "gpu";

  // kNone: every region is refused. kProcess: for an engine in its client's own
  // process. kSessions: for clients that were handed descriptors.
  enum class Kind { kNone, kProcess, kSessions };

  // Both outlive the table. device: for regions of its memory; null: there are none.
  RegionTable(Kind kind, MemoryBudget* budget, Device* device = nullptr);

  // A new session's id.
  std::string OpenSession() ABSL_LOCKS_EXCLUDED(mutex_);
  // Its regions go as Detach.
  void CloseSession(const std::string& session) ABSL_LOCKS_EXCLUDED(mutex_);

  // A region of host memory, charged to the budget.
  // NOT_FOUND, reason SESSION_NOT_FOUND; RESOURCE_EXHAUSTED for memory or the
  // most regions of a session; UNIMPLEMENTED without sessions.
  // INVALID_ARGUMENT unless bytes is positive. `ready` is called with the region
  // before anybody can name it, may be null, and may set `detached`.
  absl::StatusOr<std::shared_ptr<Region>> Attach(
      const Caller& caller, const std::string& session, int64_t bytes,
      const std::function<void(const std::shared_ptr<Region>&)>& ready = nullptr)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // A region of the memory of the device of that name or UUID, whose size is rounded up.
  // Errors as Attach, and INVALID_ARGUMENT for a device that is not there or no GPU.
  absl::StatusOr<std::shared_ptr<Region>> AttachGpu(const Caller& caller,
                                                    const std::string& session, int64_t bytes,
                                                    const std::string& device)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The session's regions by id. Errors as Attach.
  absl::StatusOr<std::vector<std::shared_ptr<Region>>> List(const Caller& caller,
                                                            const std::string& session) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for who holds the session's socket.
  absl::StatusOr<std::vector<std::shared_ptr<Region>>> ListOf(const std::string& session) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing can name the region any more; its memory is free when no request
  // uses it. NOT_FOUND, reason REGION_NOT_FOUND.
  absl::Status Detach(const Caller& caller, const std::string& session, std::string_view id)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // NOT_FOUND, reason REGION_NOT_FOUND; UNIMPLEMENTED where there are none.
  absl::StatusOr<std::shared_ptr<Region>> Find(const Caller& caller, std::string_view id) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Regions = std::map<std::string, std::shared_ptr<Region>, std::less<>>;
  struct Session {
    Regions regions;
    // Whose calls it takes: of who has attached a region first.
    std::optional<std::string> name_space;

    bool IsOthers(const Caller& caller) const {
      return name_space.has_value() && *name_space != caller.name_space();
    }
  };

  absl::Status CheckSessions() const;
  // Whether the session can have one more region, of so many bytes.
  absl::Status CheckAttach(const Caller& caller, const std::string& session, int64_t bytes) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets it be named. NOT_FOUND, and then it is detached.
  absl::StatusOr<std::shared_ptr<Region>> Add(const std::string& session,
                                              std::shared_ptr<Region> region)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Of a region that the tables have no more, without the lock.
  static void Detached(Region& region);

  const Kind kind_;
  MemoryBudget* const budget_;
  Device* const device_;
  const std::shared_ptr<Region> process_;
  const std::shared_ptr<Region> gpu_;
  mutable Mutex mutex_;
  std::map<std::string, Session> sessions_ ABSL_GUARDED_BY(mutex_);
  Regions regions_ ABSL_GUARDED_BY(mutex_);  // of all sessions
};

// The regions that a caller may name. Outlived by table and caller.
class CallerRegions {
 public:
  CallerRegions(const RegionTable& table, const Caller& caller) : table_(table), caller_(caller) {}
  // Errors as RegionTable::Find.
  absl::StatusOr<std::shared_ptr<Region>> Find(std::string_view id) const {
    return table_.Find(caller_, id);
  }

 private:
  const RegionTable& table_;
  const Caller& caller_;
};

}  // namespace spillway
