#include "daemon/server/daemon.h"

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/server/home.h"
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

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot_start", {{"error", std::string(status.message())}});
  return 1;
}

}  // namespace

int RunDaemon(const Config& config, const Topology& topology, const sigset_t& signals) {
  absl::StatusOr<std::unique_ptr<Home>> home = Home::Open(config, "--memory-limit");
  if (!home.ok()) return Fail(home.status());
  LogSystem(config, topology, (*home)->device());
  {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config, (*home)->engine());
    if (!server.ok()) return Fail(server.status());
    LogInfo("serving", {{"address", (*server)->address()}, {"boot_id", (*server)->boot_id()}});
    int signal = 0;
    sigwait(&signals, &signal);
    LogInfo("draining", {{"signal", absl::StrCat("SIG", sigabbrev_np(signal))},
                         {"grace_seconds", absl::StrCat(config.grace_seconds)}});
    (*server)->Drain(absl::Seconds(config.grace_seconds));
  }
  home->reset();
  LogInfo("stopped");
  return 0;
}

}  // namespace spillway
