#include "daemon/server/daemon.h"

#include <cstring>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/config/socket_path.h"
#include "daemon/http/http_server.h"
#include "daemon/server/descriptors.h"
#include "daemon/server/drain.h"
#include "daemon/server/home.h"
#include "daemon/server/logging.h"
#include "daemon/server/mps.h"
#include "daemon/server/mps_system.h"
#include "daemon/server/server.h"
#include "daemon/server/service_manager.h"
#include "daemon/server/watchdog.h"
#include "host/base/status_macros.h"

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

// Checks what came of MPS, and says so in one line.
absl::Status CheckMps(const Config& config, const Mps& mps, const Device& device) {
  std::vector<DeviceInfo> devices;
  for (const Device* part : device.parts()) devices.push_back(part->info());
  ASSIGN_OR_RETURN(const std::optional<Mps::Report> report, mps.Check(devices));
  if (!report) return absl::OkStatus();
  Log(report->warning ? LogLevel::kWarning : LogLevel::kInfo, "mps",
      {{"setting", ModeName(config.mps)},
       {"attached", report->attached ? "yes" : "no"},
       {"reason", report->reason},
       {"advice", report->advice}});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(const Config& config, const Server& server) {
  ASSIGN_OR_RETURN(const std::string address, TcpAddress(config.http_listen, config.allow_remote));
  if (!IsLoopback(address)) {
    Log(LogLevel::kWarning, "remote_plaintext",
        {{"address", absl::StrCat("http://", address)},
         {"advice", "whoever reaches it sees what the daemon holds and does, without TLS"}});
  }
  return HttpServer::Start(address, config.allow_remote, server.metrics());
}

std::unique_ptr<Watchdog> StartWatchdog(const ServiceManager& manager, Server& server) {
  const absl::Duration interval = manager.beat_interval_max();
  if (interval == absl::InfiniteDuration()) return nullptr;
  return std::make_unique<Watchdog>(
      interval / 2, [&server, interval] { return server.CheckServing(interval / 4); },
      [&manager] { manager.Beat(); });
}

// What may change while it serves.
void Apply(const Config& config, Server& server) {
  SetLogLevel(config.log_level);
  server.Apply(config);
}

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot_start", {{"error", std::string(status.message())}});
  return 1;
}

}  // namespace

int RunDaemon(const Config& config, const Topology& topology, const sigset_t& signals,
              const ReadConfig& read) {
  const ServiceManager manager;
  // Before CUDA, which decides with its first call whether it attaches.
  const std::unique_ptr<MpsSystem> system = CreateMpsSystem();
  const absl::StatusOr<Mps> mps = Mps::Prepare(config, system.get());
  if (!mps.ok()) return Fail(mps.status());
  absl::StatusOr<std::unique_ptr<Home>> home = Home::Open(config, "--memory-limit");
  if (!home.ok()) return Fail(home.status());
  LogSystem(config, topology, (*home)->device());
  if (const absl::Status status = CheckMps(config, *mps, (*home)->device()); !status.ok()) {
    return Fail(status);
  }
  // After MPS, for its programs keep the limit that they inherit.
  const int64_t descriptor_limit = RaiseDescriptorLimit();
  {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config, (*home)->engine());
    if (!server.ok()) return Fail(server.status());
    LogInfo("serving", {{"address", (*server)->address()},
                        {"boot_id", (*server)->boot_id()},
                        {"descriptor_limit", absl::StrCat(descriptor_limit)}});
    std::unique_ptr<HttpServer> http;
    if (!config.http_listen.empty()) {
      absl::StatusOr<std::unique_ptr<HttpServer>> started = StartHttp(config, **server);
      if (!started.ok()) return Fail(started.status());
      http = *std::move(started);
      LogInfo("serving_http", {{"address", http->address()}});
    }
    const std::unique_ptr<Watchdog> watchdog = StartWatchdog(manager, **server);
    const std::string serving = absl::StrCat("Serving at ", (*server)->address());
    manager.Ready(serving);
    Config running = config;
    int signal = 0;
    for (;;) {
      sigwait(&signals, &signal);
      if (signal != SIGHUP || read == nullptr) break;
      manager.Reloading();
      Reload(
          read, [&server](const Config& changed) { Apply(changed, **server); }, running);
      manager.Ready(serving);
    }
    LogInfo("draining", {{"signal", absl::StrCat("SIG", sigabbrev_np(signal))},
                         {"grace_seconds", absl::StrCat(running.grace_seconds)}});
    DrainAndStop(**server, absl::Seconds(running.grace_seconds), signals, manager);
  }
  manager.Stopping("Giving memory back", kGiveBackTime);
  home->reset();
  LogInfo("stopped");
  return 0;
}

}  // namespace spillway
