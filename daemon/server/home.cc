#include "daemon/server/home.h"

#include <span>
#include <utility>

#include "daemon/server/devices.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Of the memory limit, what rows and codes never take beside the messages' share.
constexpr int64_t kAttendShare = 32;

}  // namespace

Home::Home(const Config& config, const std::string& limit_name)
    : budget_(config.memory_limit_bytes, MemoryBudget::MessageShare(config.memory_limit_bytes),
              limit_name) {}

Home::~Home() {
  if (auditor_ != nullptr) auditor_->Stop();
  engine_.reset();
  // Extents are unregistered while the device still lives.
  arena_.reset();
}

absl::StatusOr<std::unique_ptr<Home>> Home::Open(const Config& config,
                                                 const std::string& limit_name) {
  std::unique_ptr<Home> home(new Home(config, limit_name));
  const int64_t limit_bytes = config.memory_limit_bytes;
  ArenaOptions options;
  // Rows and codes leave room for page tables and workspaces, so that what
  // fills the rest can be attended to.
  options.limit_bytes = limit_bytes - home->budget_.message_bytes() - limit_bytes / kAttendShare;
  // The arena comes before the device, which takes memory from it.
  std::unique_ptr<Device>& device = home->device_;
  Arena::ExtentObserver observer;
  observer.committed = [&device](std::span<std::byte> extent) {
    return device->RegisterMemory(extent);
  };
  observer.released = [&device](std::span<std::byte> extent) { device->UnregisterMemory(extent); };
  ASSIGN_OR_RETURN(home->arena_, Arena::Create(options, &home->budget_, observer));
  ASSIGN_OR_RETURN(device, OpenDevice(config, home->arena_.get(), &home->budget_));
  home->auditor_ = std::make_unique<Auditor>(
      AuditOptions{.share = config.audit_share, .cpu_share = config.audit_cpu_share});
  home->engine_ =
      std::make_unique<Engine>(device.get(), home->arena_.get(), &home->budget_,
                               EngineOptions{.sequence_count_max = config.sequence_count_max,
                                             .model_count_max = config.model_count_max,
                                             .auditor = home->auditor_.get()});
  return home;
}

}  // namespace spillway
