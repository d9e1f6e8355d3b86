#include "daemon/server/daemon.h"

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/config/socket_path.h"
#include "daemon/http/http_server.h"
#include "daemon/server/connection_shield.h"
#include "daemon/server/drain.h"
#include "daemon/server/listeners.h"
#include "daemon/server/loss_policy.h"
#include "daemon/server/mps.h"
#include "daemon/server/mps_system.h"
#include "daemon/server/network_server.h"
#include "daemon/server/service_manager.h"
#include "daemon/server/shielded_reads.h"
#include "daemon/server/watchdog.h"
#include "host/base/descriptor_limit.h"
#include "host/base/status_macros.h"
#include "services/home.h"
#include "services/log/logging.h"

namespace spillway {
namespace {

// Logs the machine: one line per topic, and one per device.
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

// Checks whether MPS is used as the settings ask, and logs the result in one line.
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

absl::StatusOr<std::unique_ptr<HttpServer>> StartHttp(const Config& config,
                                                      const NetworkServer& server) {
  ASSIGN_OR_RETURN(const std::string address, TcpAddress(config.http_listen, config.allow_remote));
  ASSIGN_OR_RETURN(TcpListeners bound, ListenAtTcp(address));
  if (!IsLoopback(address)) {
    Log(LogLevel::kWarning, "remote_plaintext",
        {{"address", absl::StrCat("http://", address)},
         {"advice", "everybody who can reach it can read status and metrics, without TLS"}});
  }
  auto http =
      std::make_unique<HttpServer>(std::move(bound.sockets), config.allow_remote, server.metrics());
  LogInfo("serving_http",
          {{"address", absl::StrCat(address.substr(0, address.rfind(':')), ":", bound.port)}});
  return http;
}

std::unique_ptr<Watchdog> StartWatchdog(const ServiceManager& manager, NetworkServer& server) {
  const absl::Duration interval = manager.beat_interval_max();
  if (interval == absl::InfiniteDuration()) return nullptr;
  return std::make_unique<Watchdog>(
      interval / 2, [&server, interval] { return server.CheckServing(interval / 4); },
      [&manager] { manager.Beat(); });
}

// Applies the settings that may change while the daemon serves.
void Apply(const Config& config, NetworkServer& server) {
  SetLogLevel(config.log_level);
  server.Apply(config);
}

// All that a server needs. Members are destroyed in reverse order.
struct Base {
  std::unique_ptr<MpsSystem> system;
  std::unique_ptr<Mps> mps;
  std::unique_ptr<Home> home;
};

absl::StatusOr<Base> Open(const Config& config, const Topology& topology,
                          DeviceWatch::OnLost device_lost) {
  Base base;
  // Before CUDA is used: its first call decides whether the process attaches to MPS.
  base.system = CreateMpsSystem();
  ASSIGN_OR_RETURN(Mps mps, Mps::Prepare(config, base.system.get()));
  base.mps = std::make_unique<Mps>(std::move(mps));
  ASSIGN_OR_RETURN(base.home, Home::Open(config, "--memory-limit", std::move(device_lost)));
  LogSystem(config, topology, base.home->device());
  RETURN_IF_ERROR(CheckMps(config, *base.mps, base.home->device()));
  return base;
}

// Waits for the next signal that the daemon can act on.
int WaitForSignal(const Config& config, const sigset_t& signals) {
  for (;;) {
    int signal = 0;
    sigwait(&signals, &signal);
    if (signal != SIGUSR2 || !config.arena_directory.empty()) return signal;
    Log(LogLevel::kWarning, "not_relaunched",
        {{"signal", "SIGUSR2"},
         {"advice", "rows end with the process: set memory.arena_directory to keep them"}});
  }
}

}  // namespace

int RunDaemon(const Config& asked, const Topology& topology, const sigset_t& signals,
              const ReadConfig& read) {
  Config config = asked;
  const ServiceManager manager;
  LossPolicy losses(Relaunch::FromEnvironment(), signals);
  losses.Begin(config);
  const auto device_lost = [&losses, &config](const DeviceWatch::Loss& loss) {
    losses.Lost(config, loss);
  };
  absl::StatusOr<Base> base = Open(config, topology, device_lost);
  if (!base.ok() && losses.past().count > 0) {
    if (const std::optional<int> exit_code = losses.WaitForGpu(config, base.status())) {
      return *exit_code;
    }
    base = Open(config, topology, device_lost);
  }
  if (!base.ok()) return CannotStart(base.status());
  // After MPS was started: its programs inherit the limit that is in force when they start.
  const int64_t descriptor_limit = RaiseDescriptorLimit();
  if (!ReadsAreShielded()) {
    return CannotStart(
        absl::InternalError("gRPC's reads do not pass through the shield against misuse: the "
                            "program was linked wrongly"));
  }
  ConnectionShield::Get().Enable(config.stream_count_max);
  int signal = 0;
  {
    absl::StatusOr<std::unique_ptr<NetworkServer>> server =
        NetworkServer::Start(config, base->home->engine(), losses.past());
    if (!server.ok()) return CannotStart(server.status());
    LogInfo("serving", {{"address", (*server)->address()},
                        {"boot_id", (*server)->boot_id()},
                        {"descriptor_limit", absl::StrCat(descriptor_limit)}});
    std::unique_ptr<HttpServer> http;
    if (!config.http_listen.empty()) {
      absl::StatusOr<std::unique_ptr<HttpServer>> started = StartHttp(config, **server);
      if (!started.ok()) return CannotStart(started.status());
      http = *std::move(started);
    }
    const std::unique_ptr<Watchdog> watchdog = StartWatchdog(manager, **server);
    const std::string serving = absl::StrCat("Serving at ", (*server)->address());
    manager.Ready(serving);
    Config running = asked;
    for (;;) {
      signal = WaitForSignal(config, signals);
      if (signal != SIGHUP || read == nullptr) break;
      manager.Reloading();
      Reload(
          read, [&server](const Config& changed) { Apply(changed, **server); }, running);
      manager.Ready(serving);
    }
    if (signal == SIGUSR2) {
      manager.Reloading();
    } else {
      losses.End();
    }
    LogInfo("draining", {{"signal", absl::StrCat("SIG", sigabbrev_np(signal))},
                         {"grace_seconds", absl::StrCat(running.grace_seconds)}});
    DrainAndStop(**server, absl::Seconds(running.grace_seconds), signals,
                 signal == SIGUSR2 ? nullptr : &manager);
  }
  if (signal != SIGUSR2) manager.Stopping("Giving memory back", kGiveBackTime);
  base->home.reset();
  if (signal == SIGUSR2) {
    LogInfo("relaunching", {{"signal", "SIGUSR2"}});
    base->mps.reset();
    return CannotStart(losses.TakePlace());
  }
  LogInfo("stopped");
  return 0;
}

}  // namespace spillway
