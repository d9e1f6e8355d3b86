#include "daemon/server/daemon.h"

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/server/devices.h"
#include "daemon/server/logging.h"
#include "daemon/server/server.h"

namespace spillway {
namespace {

// One line each, and one for each device.
void LogSystem(const Config& config, const Topology& topology, const Device& device) {
  LogInfo("cores", {{"cores", absl::StrCat(topology.core_count)},
                    {"hardware_threads", absl::StrCat(topology.hardware_thread_count)}});
  std::vector<std::string> nodes;
  for (const NumaNode& node : topology.numa_nodes) {
    nodes.push_back(absl::StrCat(node.core_count, "c/", FormatBytes(node.memory_bytes)));
  }
  LogInfo("numa", {{"nodes", absl::StrCat(topology.numa_nodes.size())},
                   {"node_cores_memory", absl::StrJoin(nodes, ",")}});
  LogInfo("huge_pages", {{"transparent", topology.transparent_huge_pages}});
  LogInfo("memory", {{"limit", FormatBytes(config.memory_limit_bytes)},
                     {"machine", FormatBytes(topology.memory_bytes)},
                     {"cgroup", topology.cgroup_memory_limit_bytes
                                    ? FormatBytes(*topology.cgroup_memory_limit_bytes)
                                    : "none"}});
  LogInfo("simd", {{"target", device.info().simd_target}});
  for (const Device* part : device.parts()) {
    const DeviceInfo& info = part->info();
    LogInfo("device", {{"name", info.name},
                       {"description", info.description},
                       {"uuid", info.uuid.empty() ? "none" : info.uuid},
                       {"threads", absl::StrCat(info.thread_count)}});
  }
}

// Of the memory limit, what rows and codes never take beside the messages' share.
constexpr int64_t kAttendShare = 32;

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot_start", {{"error", std::string(status.message())}});
  return 1;
}

}  // namespace

int RunDaemon(const Config& config, const Topology& topology, const sigset_t& signals) {
  const int64_t limit_bytes = config.memory_limit_bytes;
  MemoryBudget budget(limit_bytes, MemoryBudget::MessageShare(limit_bytes), "--memory-limit");
  ArenaOptions arena_options;
  // Rows and codes leave room for page tables and workspaces, so that what
  // fills the rest can be attended to.
  arena_options.limit_bytes = limit_bytes - budget.message_bytes() - limit_bytes / kAttendShare;
  // The arena comes before the device, which registers its extents.
  std::unique_ptr<Device> device;
  Arena::ExtentObserver observer;
  observer.committed = [&device](std::span<std::byte> extent) {
    return device->RegisterMemory(extent);
  };
  observer.released = [&device](std::span<std::byte> extent) { device->UnregisterMemory(extent); };
  absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(arena_options, &budget, observer);
  if (!arena.ok()) return Fail(arena.status());
  absl::StatusOr<std::unique_ptr<Device>> opened = OpenDevice(config, arena->get(), &budget);
  if (!opened.ok()) return Fail(opened.status());
  device = *std::move(opened);
  LogSystem(config, topology, *device);
  {
    Auditor auditor({.share = config.audit_share, .cpu_share = config.audit_cpu_share});
    Engine engine(device.get(), arena->get(), &budget,
                  {.sequence_count_max = config.sequence_count_max, .auditor = &auditor});
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config, engine);
    if (!server.ok()) return Fail(server.status());
    LogInfo("serving", {{"address", (*server)->address()}, {"boot_id", (*server)->boot_id()}});
    int signal = 0;
    sigwait(&signals, &signal);
    LogInfo("draining", {{"signal", absl::StrCat("SIG", sigabbrev_np(signal))},
                         {"grace_seconds", absl::StrCat(config.grace_seconds)}});
    (*server)->Drain(absl::Seconds(config.grace_seconds));
    auditor.Stop();
  }
  // Extents are unregistered while the device still lives.
  arena->reset();
  LogInfo("stopped");
  return 0;
}

}  // namespace spillway
