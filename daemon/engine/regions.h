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

// Memory that requests can name instead of carrying bytes. Its client may write to it at any time.
// It stays alive while requests hold it.
struct Region {
  std::string id;
  // The namespace whose callers may name it.
  std::string name_space;
  std::span<std::byte> bytes;
  // The host memory, if the daemon allocated it; else null.
  std::unique_ptr<SharedMemory> memory;
  // The GPU memory, if the daemon allocated it; else null.
  std::unique_ptr<SharedDeviceMemory> gpu_memory;
  // Whether it is GPU memory, which the host cannot read.
  bool on_gpu = false;
  MemoryReservation reservation;

  // The GPU whose memory it is; null: unknown, or host memory.
  const Device* gpu() const { return gpu_memory == nullptr ? nullptr : &gpu_memory->device(); }
  // Called once, when requests can no longer name the region. May be null.
  std::function<void()> detached;
};

// The regions of all clients. A client's regions belong to its session, which ends with the
// client's process. A session and its regions belong to the namespace of the caller that attaches
// the first region. In this namespace, any caller that knows a region's id may use the region; ids
// cannot be guessed. Thread-safe.
class RegionTable {
 public:
  // Regions of one session.
  static constexpr int64_t kRegionCountMax = 256;
  // Name of the region that is all memory of the process, for kProcess; offsets in it are
  // addresses.
  static constexpr char kProcessRegion[] = "process";
  // The same for the memory of the process's GPUs.
  static constexpr char kGpuRegion[] = "gpu";

  // kNone: every region is refused. kProcess: for an engine in its client's process. kSessions: for
  // clients that get file descriptors of the memory.
  enum class Kind { kNone, kProcess, kSessions };

  // budget and device must outlive the table. device: for regions in its memory; null: there are
  // none.
  RegionTable(Kind kind, MemoryBudget* budget, Device* device = nullptr);

  // Opens a session, and returns its id.
  std::string OpenSession() ABSL_LOCKS_EXCLUDED(mutex_);
  // Detaches all regions of the session.
  void CloseSession(const std::string& session) ABSL_LOCKS_EXCLUDED(mutex_);

  // Creates a region of host memory, which is charged to the budget. NOT_FOUND, reason
  // SESSION_NOT_FOUND; RESOURCE_EXHAUSTED if memory is exhausted or the session has kRegionCountMax
  // regions; UNIMPLEMENTED without sessions; INVALID_ARGUMENT unless bytes is positive. `ready`,
  // which may be null, is called with the region before anybody can name it, and may set
  // `detached`.
  absl::StatusOr<std::shared_ptr<Region>> Attach(
      const Caller& caller, const std::string& session, int64_t bytes,
      const std::function<void(const std::shared_ptr<Region>&)>& ready = nullptr)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Creates a region in the memory of the device with this name or UUID; its size is rounded up.
  // Errors as Attach(), and INVALID_ARGUMENT if there is no such device or it is no GPU.
  absl::StatusOr<std::shared_ptr<Region>> AttachGpu(const Caller& caller,
                                                    const std::string& session, int64_t bytes,
                                                    const std::string& device)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The session's regions, ordered by id. NOT_FOUND, reason SESSION_NOT_FOUND; UNIMPLEMENTED
  // without sessions.
  absl::StatusOr<std::vector<std::shared_ptr<Region>>> List(const Caller& caller,
                                                            const std::string& session) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for the client at the session's socket, without a check of its namespace.
  absl::StatusOr<std::vector<std::shared_ptr<Region>>> ListOf(const std::string& session) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // From then on, nobody can name the region; its memory is freed when no request uses it.
  // NOT_FOUND, reason SESSION_NOT_FOUND or REGION_NOT_FOUND.
  absl::Status Detach(const Caller& caller, const std::string& session, std::string_view id)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // NOT_FOUND, reason REGION_NOT_FOUND; UNIMPLEMENTED for kNone.
  absl::StatusOr<std::shared_ptr<Region>> Find(const Caller& caller, std::string_view id) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Regions = std::map<std::string, std::shared_ptr<Region>, std::less<>>;
  struct Session {
    Regions regions;
    // The namespace of the caller that attached the first region: only its callers may use the
    // session.
    std::optional<std::string> name_space;

    bool IsOthers(const Caller& caller) const {
      return name_space.has_value() && *name_space != caller.name_space();
    }
  };

  absl::Status CheckSessions() const;
  // Whether the caller can attach one more region of `bytes` bytes to the session.
  absl::Status CheckAttach(const Caller& caller, const std::string& session, int64_t bytes) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes the region known by name. If the session is gone, detaches it and returns NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Region>> Add(const std::string& session,
                                              std::shared_ptr<Region> region)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls region.detached. The region must be out of the tables, and the mutex must not be held.
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

// The regions that a caller may name. Table and caller must outlive it.
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
