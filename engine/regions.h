#pragma once

#include <chrono>
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
#include "engine/account.h"
#include "engine/account_charge.h"
#include "engine/caller.h"
#include "engine/detached_regions.h"
#include "host/base/mutex.h"
#include "host/device/device.h"
#include "host/memory/memory_budget.h"
#include "host/memory/shared_memory.h"

namespace spillway {

// Memory that requests can name instead of carrying bytes. Its client may write to it at any time.
// It stays alive while requests hold it.
struct Region {
  Region() = default;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

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
  AccountCharge charge;  // of the namespace's account
  // Takes `memory` at the end; null: the memory just ends.
  std::shared_ptr<DetachedRegions> ended = nullptr;

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
  using Clock = std::chrono::steady_clock;

  // What a session is used for.
  struct SessionUse {
    bool has_regions = false;
    // When a call named it last; empty: none has.
    std::optional<Clock::time_point> named = {};
  };

  // All must outlive the table. accounts: charged with the regions. device: for regions in its
  // memory; null: there are none. region_count_max: regions of all sessions together, with those
  // that were detached while clients hold their memory.
  RegionTable(Kind kind, MemoryBudget* budget, AccountTable* accounts, Device* device = nullptr,
              int64_t region_count_max = 16384);

  // Opens a session, and returns its id.
  std::string OpenSession() ABSL_LOCKS_EXCLUDED(mutex_);
  // Detaches all regions of the session.
  void CloseSession(const std::string& session) ABSL_LOCKS_EXCLUDED(mutex_);
  // What would be lost if the session were closed. REQUIRES: the session is open.
  SessionUse UseOf(const std::string& session) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the charges for memory of earlier regions that no client holds any more.
  void Collect() { ended_->Collect(); }
  // From now on, memory of regions that end keeps its content, because this process ends.
  void KeepContent() { ended_->KeepContent(); }

  // Creates a region of host memory, which is charged to the budget and to the caller's account.
  // NOT_FOUND, reason SESSION_NOT_FOUND; RESOURCE_EXHAUSTED if memory or the account's quota is
  // exhausted, or the session has kRegionCountMax regions, or all have region_count_max;
  // UNIMPLEMENTED without sessions; INVALID_ARGUMENT unless bytes is positive. `ready`, which may
  // be null, is called with the region before anybody can name it, and may set `detached`.
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
                                                            const std::string& session)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for the client at the session's socket, without a check of its namespace.
  absl::StatusOr<std::vector<std::shared_ptr<Region>>> ListOf(const std::string& session) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // From then on, nobody can name the region; its memory is freed when no request uses it, and it
  // is charged until no process holds it. NOT_FOUND, reason SESSION_NOT_FOUND or REGION_NOT_FOUND.
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
    std::optional<Clock::time_point> named;  // SessionUse::named

    bool IsOthers(const Caller& caller) const {
      return name_space.has_value() && *name_space != caller.name_space();
    }
  };

  absl::Status CheckSessions() const;
  // The session, if it is open and may be the caller's. SESSION_NOT_FOUND.
  absl::StatusOr<Session*> SessionOf(const Caller& caller, const std::string& session)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the caller can attach one more region of `bytes` bytes to the session.
  absl::Status CheckAttach(const Caller& caller, const std::string& session, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // A region of the caller, charged to its account and, if it is in host memory, to the budget.
  absl::StatusOr<std::shared_ptr<Region>> Charged(const Caller& caller, int64_t bytes, bool on_gpu);
  // Makes the region known by name. If the session is gone, detaches it and returns NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Region>> Add(const std::string& session,
                                              std::shared_ptr<Region> region)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls region.detached. The region must be out of the tables, and the mutex must not be held.
  static void Detached(Region& region);

  const Kind kind_;
  MemoryBudget* const budget_;
  AccountTable* const accounts_;
  Device* const device_;
  const int64_t region_count_max_;
  const std::shared_ptr<DetachedRegions> ended_ = std::make_shared<DetachedRegions>();
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
