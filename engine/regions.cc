#include "engine/regions.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/registry.h"
#include "host/base/random_id.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

absl::Status SessionNotFound() {
  return WithReason(
      absl::NotFoundError("there is no such session: its socket was closed, or it never existed"),
      Reason::kSessionNotFound);
}

absl::Status RegionNotFound(std::string_view id) {
  return WithReason(absl::NotFoundError(absl::StrCat("no region regions/", std::string(id),
                                                     ": it was detached, or its session ended")),
                    Reason::kRegionNotFound, {{"name", absl::StrCat("regions/", std::string(id))}});
}

std::shared_ptr<Region> ProcessRegion(const char* id, bool on_gpu) {
  auto region = std::make_shared<Region>();
  region->id = id;
  region->on_gpu = on_gpu;
  // It begins at address 0, so that offsets are addresses.
  region->bytes = {static_cast<std::byte*>(nullptr),
                   static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  return region;
}

absl::Status TooMany(const char* whose, int64_t count, const char* why) {
  return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                        whose, " has ", count, " regions already, the most that ", why)),
                    Reason::kRegionCountExhausted);
}

}  // namespace

Region::~Region() {
  if (memory == nullptr || ended == nullptr) return;
  ended->Take({std::move(memory), std::move(reservation), std::move(charge)});
}

RegionTable::RegionTable(Kind kind, MemoryBudget* budget, AccountTable* accounts, Device* device,
                         int64_t region_count_max)
    : kind_(kind),
      budget_(budget),
      accounts_(accounts),
      device_(device),
      region_count_max_(region_count_max),
      process_(kind == Kind::kProcess ? ProcessRegion(kProcessRegion, false) : nullptr),
      gpu_(kind == Kind::kProcess ? ProcessRegion(kGpuRegion, true) : nullptr) {}

absl::Status RegionTable::CheckSessions() const {
  if (kind_ == Kind::kSessions) return absl::OkStatus();
  return absl::UnimplementedError(
      "regions need a unix socket: only clients on the daemon's host can share memory with it");
}

std::string RegionTable::OpenSession() {
  std::string id = RandomId();
  const MutexLock lock(mutex_);
  sessions_.emplace(id, Session());
  return id;
}

void RegionTable::Detached(Region& region) {
  if (const auto detached = std::exchange(region.detached, nullptr)) detached();
}

void RegionTable::CloseSession(const std::string& session) {
  Regions gone;  // freed after the lock is released
  {
    const MutexLock lock(mutex_);
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    gone = std::move(found->second.regions);
    sessions_.erase(found);
    for (const auto& [id, region] : gone) regions_.erase(id);
  }
  for (const auto& [id, region] : gone) Detached(*region);
}

RegionTable::SessionUse RegionTable::UseOf(const std::string& session) const {
  const MutexLock lock(mutex_);
  const Session& found = sessions_.at(session);
  return {!found.regions.empty(), found.named};
}

absl::StatusOr<RegionTable::Session*> RegionTable::SessionOf(const Caller& caller,
                                                             const std::string& session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second.IsOthers(caller)) return SessionNotFound();
  found->second.named = Clock::now();
  return &found->second;
}

absl::Status RegionTable::CheckAttach(const Caller& caller, const std::string& session,
                                      int64_t bytes) {
  RETURN_IF_ERROR(CheckSessions());
  if (bytes <= 0) {
    return InvalidField("byte_count", absl::StrCat("value ", bytes, " is not positive"));
  }
  if (ended_->count() > 0) ended_->Collect();
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const Session* const found, SessionOf(caller, session));
  if (static_cast<int64_t>(found->regions.size()) >= kRegionCountMax) {
    return TooMany("the session", kRegionCountMax, "it may have");
  }
  if (static_cast<int64_t>(regions_.size()) + ended_->count() >= region_count_max_) {
    return TooMany("the daemon", region_count_max_, "its limit of open files allows");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Region>> RegionTable::Add(const std::string& session,
                                                         std::shared_ptr<Region> region) {
  {
    const MutexLock lock(mutex_);
    const auto found = sessions_.find(session);
    if (found != sessions_.end() &&
        found->second.name_space.value_or(region->name_space) == region->name_space) {
      found->second.name_space = region->name_space;
      found->second.regions.emplace(region->id, region);
      regions_.emplace(region->id, region);
      return region;
    }
  }
  Detached(*region);
  return SessionNotFound();
}

absl::StatusOr<std::shared_ptr<Region>> RegionTable::Charged(const Caller& caller, int64_t bytes,
                                                             bool on_gpu) {
  auto region = std::make_shared<Region>();
  region->id = RandomId();
  region->name_space = caller.name_space();
  region->on_gpu = on_gpu;
  region->charge = AccountCharge(accounts_->Of(caller.name_space()));
  RETURN_IF_ERROR(region->charge.Add(bytes));
  if (on_gpu) return region;
  ASSIGN_OR_RETURN(region->reservation, budget_->Reserve(bytes, "a region", MemoryUse::kOther));
  return region;
}

absl::StatusOr<std::shared_ptr<Region>> RegionTable::Attach(
    const Caller& caller, const std::string& session, int64_t bytes,
    const std::function<void(const std::shared_ptr<Region>&)>& ready) {
  RETURN_IF_ERROR(CheckAttach(caller, session, bytes));
  ASSIGN_OR_RETURN(std::shared_ptr<Region> region, Charged(caller, bytes, false));
  ASSIGN_OR_RETURN(region->memory, SharedMemory::Create(bytes));
  region->bytes = region->memory->bytes();
  region->ended = ended_;
  if (ready != nullptr) ready(region);
  return Add(session, std::move(region));
}

absl::StatusOr<std::shared_ptr<Region>> RegionTable::AttachGpu(const Caller& caller,
                                                               const std::string& session,
                                                               int64_t bytes,
                                                               const std::string& device) {
  RETURN_IF_ERROR(CheckAttach(caller, session, bytes));
  if (device_ == nullptr) return InvalidField("device", "the daemon has no device");
  ASSIGN_OR_RETURN(std::shared_ptr<Region> region, Charged(caller, bytes, true));
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> memory =
      device_->AllocateShared(device, bytes);
  if (absl::IsInvalidArgument(memory.status())) {
    return InvalidField("device", std::string(memory.status().message()));
  }
  RETURN_IF_ERROR(memory.status());
  region->gpu_memory = *std::move(memory);
  region->bytes = region->gpu_memory->bytes();
  region->charge.Settle(static_cast<int64_t>(region->bytes.size()));
  return Add(session, std::move(region));
}

absl::StatusOr<std::vector<std::shared_ptr<Region>>> RegionTable::List(const Caller& caller,
                                                                       const std::string& session) {
  RETURN_IF_ERROR(CheckSessions());
  {
    const MutexLock lock(mutex_);
    RETURN_IF_ERROR(SessionOf(caller, session).status());
  }
  return ListOf(session);
}

absl::StatusOr<std::vector<std::shared_ptr<Region>>> RegionTable::ListOf(
    const std::string& session) const {
  RETURN_IF_ERROR(CheckSessions());
  const MutexLock lock(mutex_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return SessionNotFound();
  std::vector<std::shared_ptr<Region>> regions;
  for (const auto& [id, region] : found->second.regions) regions.push_back(region);
  return regions;
}

absl::Status RegionTable::Detach(const Caller& caller, const std::string& session,
                                 std::string_view id) {
  RETURN_IF_ERROR(CheckSessions());
  std::shared_ptr<Region> gone;  // freed after the lock is released
  {
    const MutexLock lock(mutex_);
    ASSIGN_OR_RETURN(Session* const found, SessionOf(caller, session));
    Regions& regions = found->regions;
    const auto region = regions.find(id);
    if (region == regions.end()) return RegionNotFound(id);
    gone = region->second;
    regions.erase(region);
    regions_.erase(gone->id);
  }
  Detached(*gone);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Region>> RegionTable::Find(const Caller& caller,
                                                          std::string_view id) const {
  if (process_ != nullptr && id == kProcessRegion) return process_;
  if (gpu_ != nullptr && id == kGpuRegion) return gpu_;
  if (kind_ == Kind::kNone) RETURN_IF_ERROR(CheckSessions());
  const MutexLock lock(mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end() || found->second->name_space != caller.name_space()) {
    return RegionNotFound(id);
  }
  return found->second;
}

}  // namespace spillway
