#include "services/home.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "host/base/status_macros.h"
#include "services/devices.h"
#include "services/log/logging.h"

namespace spillway {
namespace {

// Rows and codes leave 1/32 of the memory limit free, in addition to the share for messages.
constexpr int64_t kAttendShare = 32;

std::optional<uint64_t> SamplingSeedOf(const Config& config) {
  if (config.sampling_seed < 0) return std::nullopt;
  return static_cast<uint64_t>(config.sampling_seed);
}

}  // namespace

absl::Duration UnnamedGraceOf(const Config& config) {
  return config.unnamed_grace_seconds == 0 ? absl::InfiniteDuration()
                                           : absl::Seconds(config.unnamed_grace_seconds);
}

Home::Home(const Config& config, const std::string& limit_name)
    : budget_(config.memory_limit_bytes, MemoryBudget::MessageShare(config.memory_limit_bytes),
              limit_name) {}

Home::~Home() {
  if (auditor_ != nullptr) auditor_->Stop();
  engine_.reset();
  // The arena unregisters its extents with the device, so it is destroyed first.
  arena_.reset();
  if (store_ != nullptr) store_->records().Observe({}).IgnoreError();
}

absl::StatusOr<std::unique_ptr<Home>> Home::Open(const Config& config,
                                                 const std::string& limit_name,
                                                 DeviceWatch::OnLost device_lost) {
  std::unique_ptr<Home> home(new Home(config, limit_name));
  const int64_t limit_bytes = config.memory_limit_bytes;
  ArenaOptions options;
  // Rows and codes leave room for page tables and workspaces, so that attends work even when the
  // arena is full.
  options.limit_bytes = limit_bytes - home->budget_.message_bytes() - limit_bytes / kAttendShare;
  options.ready_bytes = config.memory_ready_bytes;
  // The device takes memory from the arena, so the observer refers to a device that is created
  // later.
  std::unique_ptr<Device>& device = home->device_;
  Arena::ExtentObserver observer;
  observer.committed = [&device](std::span<std::byte> extent) {
    return device->RegisterMemory(extent);
  };
  observer.released = [&device](std::span<std::byte> extent) { device->UnregisterMemory(extent); };
  std::unique_ptr<ArenaFile> rows;
  if (!config.arena_directory.empty()) {
    absl::StatusOr<std::unique_ptr<Store>> store =
        Store::Open(config.arena_directory, &home->budget_);
    if (!store.ok()) {
      return absl::Status(store.status().code(),
                          absl::StrCat("memory.arena_directory: ", store.status().message()));
    }
    home->store_ = *std::move(store);
    rows = home->store_->TakeRows();
  }
  ASSIGN_OR_RETURN(home->arena_, Arena::Create(options, &home->budget_, observer, std::move(rows)));
  ASSIGN_OR_RETURN(device, OpenDevice(config, home->arena_.get(), &home->budget_));
  home->auditor_ = std::make_unique<Auditor>(
      AuditOptions{.share = config.audit_share, .cpu_share = config.audit_cpu_share});
  home->engine_ =
      std::make_unique<Engine>(device.get(), home->arena_.get(), &home->budget_,
                               EngineOptions{.sequence_count_max = config.sequence_count_max,
                                             .model_count_max = config.model_count_max,
                                             .slow_attend_seconds = config.slow_attend_ms / 1e3,
                                             .auditor = home->auditor_.get(),
                                             .unnamed_grace = UnnamedGraceOf(config),
                                             .sampling_seed = SamplingSeedOf(config),
                                             .store = home->store_.get(),
                                             .device_lost = std::move(device_lost)});
  if (home->store_ != nullptr) {
    // Devices write the lengths of layers in the records, so this memory is registered too.
    RETURN_IF_ERROR(home->store_->records().Observe({observer.committed, observer.released}));
    RETURN_IF_ERROR(home->Restore());
  }
  return home;
}

absl::Status Home::Restore() {
  const auto rebuilt = [](const Sequence& sequence, const absl::Status& status) {
    const std::string tokens = absl::StrCat(sequence.snapshot().token_count);
    if (status.ok()) {
      LogInfo("sequence_rebuilt", {{"name", sequence.name}, {"tokens", tokens}});
    } else {
      Log(LogLevel::kWarning, "sequence_not_rebuilt",
          {{"name", sequence.name}, {"tokens", tokens}, {"error", std::string(status.message())}});
    }
  };
  ASSIGN_OR_RETURN(const RestoreReport report, engine_->Restore(rebuilt));
  for (const absl::Status& lost : report.lost) {
    Log(LogLevel::kError, "record_lost", {{"error", std::string(lost.message())}});
  }
  for (const DamagedRows& damaged : report.damaged) {
    Log(LogLevel::kError, "rows_damaged",
        {{"name", damaged.name},
         {"layer", absl::StrCat(damaged.layer)},
         {"kv_head", damaged.kv_head < 0 ? "any" : absl::StrCat(damaged.kv_head)},
         {"kept_tokens", absl::StrCat(damaged.token_count)},
         {"lost_tokens", absl::StrCat(damaged.lost_token_count)}});
  }
  LogInfo("restored", {{"folder", store_->path()},
                       {"store_id", store_->identity()},
                       {"models", absl::StrCat(report.model_count)},
                       {"sequences", absl::StrCat(report.sequence_count)},
                       {"tokens", absl::StrCat(report.token_count)},
                       {"lost", absl::StrCat(report.lost.size())},
                       {"damaged", absl::StrCat(report.damaged.size())},
                       {"checked_bytes", absl::StrCat(report.checked_bytes)},
                       {"check_s", absl::StrFormat("%.3f", report.check_seconds)}});
  return absl::OkStatus();
}

}  // namespace spillway
