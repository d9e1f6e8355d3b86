#include "services/config/settings.h"

#include <limits>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace spillway {
namespace {

constexpr char kMemoryLimitKey[] = "memory.limit";

Setting Live(Setting setting) {
  setting.live = true;
  return setting;
}

absl::Status Refuse(const std::string& text, const std::string& wanted) {
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not ", wanted));
}

template <typename T>
Setting Integer(const char* key, const char* flag, const char* help, T Config::*field, int64_t low,
                int64_t high) {
  return {key,
          flag,
          help,
          false,
          [=](Config& config, const std::string& text) {
            int64_t value = 0;
            if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
              return Refuse(text, absl::StrCat("an integer in [", low, ", ", high, "]"));
            }
            config.*field = static_cast<T>(value);
            return absl::OkStatus();
          },
          [=](const Config& config) { return absl::StrCat(config.*field); }};
}

// wanted: the description of the range, for the error.
Setting Number(const char* key, const char* flag, const char* help, double Config::*field,
               std::function<bool(double)> in_range, std::string wanted) {
  return {key,
          flag,
          help,
          false,
          [field, in_range = std::move(in_range), wanted = std::move(wanted)](
              Config& config, const std::string& text) {
            double value = 0;
            if (!absl::SimpleAtod(text, &value) || !in_range(value)) return Refuse(text, wanted);
            config.*field = value;
            return absl::OkStatus();
          },
          [=](const Config& config) { return absl::StrCat(config.*field); }};
}

Setting Seconds(const char* key, const char* flag, const char* help, double Config::*field,
                double high) {
  return Number(
      key, flag, help, field, [=](double value) { return value >= 0 && value <= high; },
      absl::StrFormat("a number of seconds in [0, %.0f]", high));
}

absl::StatusOr<int64_t> ParseBytesOrZero(const std::string& text) {
  return text == "0" ? int64_t{0} : ParseBytes(text);
}
std::string FormatBytesOrZero(int64_t bytes) { return bytes == 0 ? "0" : FormatBytes(bytes); }

// A size with a unit, or 0. For limits on GPU memory.
Setting BytesOrZero(const char* key, const char* flag, const char* help, int64_t Config::*field) {
  return {key,
          flag,
          help,
          true,
          [field](Config& config, const std::string& text) {
            const absl::StatusOr<int64_t> bytes = ParseBytesOrZero(text);
            if (bytes.ok()) config.*field = *bytes;
            return bytes.status();
          },
          [field](const Config& config) { return FormatBytesOrZero(config.*field); }};
}

Setting Flag(const char* key, const char* flag, const char* help, bool Config::*field) {
  return {key,
          flag,
          help,
          false,
          [field](Config& config, const std::string& text) {
            return absl::SimpleAtob(text, &(config.*field)) ? absl::OkStatus()
                                                            : Refuse(text, "a boolean");
          },
          [field](const Config& config) { return config.*field ? "true" : "false"; },
          /*is_flag=*/true};
}

// wanted: the description of what fits, for the error.
Setting Text(const char* key, const char* flag, const char* help, std::string Config::*field,
             std::function<bool(const std::string&)> fits, std::string wanted) {
  return {key,
          flag,
          help,
          true,
          [field, fits = std::move(fits), wanted = std::move(wanted)](Config& config,
                                                                      const std::string& text) {
            if (!fits(text)) return Refuse(text, wanted);
            config.*field = text;
            return absl::OkStatus();
          },
          [field](const Config& config) { return config.*field; }};
}

Setting AnyText(const char* key, const char* flag, const char* help, std::string Config::*field) {
  return Text(
      key, flag, help, field, [](const std::string&) { return true; }, "a text");
}

bool IsAbsoluteOrEmpty(const std::string& path) { return path.empty() || path.starts_with('/'); }

Setting Choice(const char* key, const char* flag, const char* help, std::vector<std::string> names,
               std::function<void(Config&, size_t)> set,
               std::function<std::string(const Config&)> get) {
  return {
      key,
      flag,
      help,
      true,
      [names = std::move(names), set = std::move(set)](Config& config, const std::string& text) {
        for (size_t i = 0; i < names.size(); ++i) {
          if (names[i] != text) continue;
          set(config, i);
          return absl::OkStatus();
        }
        return Refuse(text, absl::StrCat("one of ", absl::StrJoin(names, ", ")));
      },
      std::move(get)};
}

// cuda:N or GPU-....
bool IsGpu(const std::string& name) {
  int ordinal = 0;
  return name.starts_with("GPU-") ||
         (name.starts_with("cuda:") && absl::SimpleAtoi(name.substr(5), &ordinal) && ordinal >= 0 &&
          name == absl::StrCat("cuda:", ordinal));
}

absl::Status SetDevices(Config& config, const std::string& text) {
  const std::vector<std::string> names = absl::StrSplit(text, ',');
  if (text != "auto" && text != "cpu") {
    std::set<std::string> seen;
    for (const std::string& name : names) {
      if (!IsGpu(name)) {
        return Refuse(name, names.size() == 1
                                ? "auto, cpu, cuda:N or a GPU's UUID"
                                : "cuda:N or a GPU's UUID: a list may name only GPUs");
      }
      if (!seen.insert(name).second) {
        return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is named twice"));
      }
    }
  }
  config.devices = names;
  return absl::OkStatus();
}

// In the order of MpsMode.
const std::vector<std::string>& MpsNames() {
  static const auto* const names = new std::vector<std::string>{"off", "auto", "on"};
  return *names;
}

// In the order of WhenLost.
const std::vector<std::string>& WhenLostNames() {
  static const auto* const names = new std::vector<std::string>{"stay", "restart", "cpu"};
  return *names;
}

std::string Gibibytes(int64_t bytes) {
  return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
}

// A limit above the available memory would fail only later, in the middle of an append, and the
// kernel would then kill the daemon.
absl::Status CheckFits(int64_t bytes, const std::string& text, const Topology& topology) {
  if (bytes <= topology.memory_limit_bytes()) return absl::OkStatus();
  std::string available = absl::StrCat("the machine has ", Gibibytes(topology.memory_bytes));
  if (topology.cgroup_memory_limit_bytes.value_or(bytes) < bytes) {
    absl::StrAppend(&available, ", the control group's limit is ",
                    Gibibytes(*topology.cgroup_memory_limit_bytes));
  }
  if (topology.process_memory_limit_bytes.value_or(bytes) < bytes) {
    absl::StrAppend(&available, ", the limits of the process (ulimit -v, ulimit -d) leave it ",
                    Gibibytes(*topology.process_memory_limit_bytes));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is more memory than is available: ", available));
}

}  // namespace

const std::vector<Setting>& Settings() {
  static const auto* const settings = new std::vector<Setting>{
      Text(
          "server.listen", "--listen", "unix:/path or tcp:host:port", &Config::listen,
          [](const std::string& text) {
            return text.starts_with("unix:/") || text.starts_with("tcp:");
          },
          "unix:/path or tcp:host:port"),
      Text(
          "server.local_socket", "--local-socket",
          "unix:/path of a second socket, if --listen is a TCP address; clients on this machine "
          "use it to share memory with the daemon; empty: none",
          &Config::local_socket,
          [](const std::string& text) { return text.empty() || text.starts_with("unix:/"); },
          "unix:/path or empty"),
      AnyText("server.socket_group", "--socket-group",
              "group that may connect to the unix socket; empty: only the daemon's user may",
              &Config::socket_group),
      Flag("server.allow_remote", "--allow-remote", "allow TCP addresses other than loopback",
           &Config::allow_remote),
      Live(Seconds("server.grace_seconds", "--grace",
                   "seconds that the daemon waits for running calls when it is stopped",
                   &Config::grace_seconds, 86400)),
      Live(Integer("server.connection_count_max", "--connection-count-max",
                   "most connections at the same time; further ones are closed",
                   &Config::connection_count_max, 1, 1 << 20)),
      Integer("server.stream_count_max", "--stream-count-max",
              "most calls of one connection at the same time", &Config::stream_count_max, 1, 65536),
      Live(Integer(
          "server.open_stream_count_max", "--open-stream-count-max",
          "most streams (appends, steps, fetches, uploads) of all connections at the same time",
          &Config::open_stream_count_max, 1, 1 << 20)),
      Live(Seconds("server.stream_idle_seconds", "--stream-idle",
                   "seconds after which an append or an upload is ended if its client sends "
                   "nothing, and a fetch if its client reads nothing; 0: never",
                   &Config::stream_idle_seconds, 86400)),
      AnyText("tls.certificate", "--tls-certificate",
              "PEM file with the certificate for a TCP address and its intermediate certificates; "
              "empty: no TLS",
              &Config::tls_certificate),
      AnyText("tls.key", "--tls-key", "PEM file with the certificate's key", &Config::tls_key),
      AnyText("tls.client_ca", "--tls-client-ca",
              "PEM file with the authorities that sign clients' certificates, which clients then "
              "need; empty: clients need no certificate",
              &Config::tls_client_ca),
      AnyText(
          "auth.tokens_file", "--tokens-file",
          "TOML file with tokens, each with its namespace and quotas (spillway tokens new); every "
          "call then needs one of them; empty: calls need no token",
          &Config::tokens_file),
      Flag("auth.allow_plaintext", "--allow-plaintext-tokens",
           "allow tokens without TLS on TCP addresses other than loopback",
           &Config::allow_plaintext_tokens),
      Text(
          "http.listen", "--http-listen",
          "tcp:host:port of the status page, /metrics and /readyz, such as tcp:127.0.0.1:9464; "
          "empty: none",
          &Config::http_listen,
          [](const std::string& text) { return text.empty() || text.starts_with("tcp:"); },
          "tcp:host:port or empty"),
      {kMemoryLimitKey, "--memory-limit",
       "most host memory that the daemon may use, such as 64GiB; by default three quarters of the "
       "machine's, or of a lower limit of the control group or the process (ulimit -v)",
       true,
       [](Config& config, const std::string& text) {
         const absl::StatusOr<int64_t> bytes = ParseBytes(text);
         if (bytes.ok()) config.memory_limit_bytes = *bytes;
         return bytes.status();
       },
       [](const Config& config) { return FormatBytes(config.memory_limit_bytes); }},
      BytesOrZero("memory.ready", "--memory-ready",
                  "host memory that is committed, and pinned for GPUs, when the daemon starts, and "
                  "not given back to the system, such as 16GiB, so that prompts need not wait for "
                  "it; no more than --memory-limit leaves for rows; 0: memory is committed when it "
                  "is needed",
                  &Config::memory_ready_bytes),
      Text("memory.arena_directory", "--arena-directory",
           "absolute path of a folder on tmpfs or hugetlbfs, such as /dev/shm/spillway, in which "
           "K/V rows outlive the process; the next process continues with them; empty: rows end "
           "with the process",
           &Config::arena_directory, IsAbsoluteOrEmpty, "an absolute path or empty"),
      {"device.name", "--device",
       "auto (all GPUs, or the CPU if there are none), cpu, or a comma-separated list of GPUs, "
       "each cuda:N or a UUID",
       true, SetDevices, [](const Config& config) { return absl::StrJoin(config.devices, ","); }},
      BytesOrZero("device.gpu_memory_limit", "--gpu-memory-limit",
                  "memory of each GPU for codes and workspaces, such as 20GiB; 0: nine tenths of "
                  "the memory that is free at the start",
                  &Config::gpu_memory_limit_bytes),
      {"device.gpu_resident_limit", "--gpu-resident-limit",
       "most of --gpu-memory-limit for copies of all K/V rows of sequences in use, whose attends "
       "then read no rows over PCIe; copies make room for codes; 0: no copies; auto: seven eighths "
       "of a --gpu-memory-limit that is set, without workspaces, and no copies otherwise",
       true,
       [](Config& config, const std::string& text) {
         config.gpu_resident_limit_bytes.reset();
         if (text == "auto") return absl::OkStatus();
         const absl::StatusOr<int64_t> bytes = ParseBytesOrZero(text);
         if (bytes.ok()) config.gpu_resident_limit_bytes = *bytes;
         return bytes.status();
       },
       [](const Config& config) -> std::string {
         const std::optional<int64_t>& bytes = config.gpu_resident_limit_bytes;
         return bytes.has_value() ? FormatBytesOrZero(*bytes) : "auto";
       }},
      BytesOrZero("device.gpu_workspace", "--gpu-workspace",
                  "part of --gpu-memory-limit that codes and copies leave to workspaces, such as "
                  "256MiB; 0: a sixth, at most 4 GiB, and 16 to 22 % of less than 4 GiB",
                  &Config::gpu_workspace_bytes),
      Flag("device.reproducible", "--reproducible",
           "choose rows by codes also where all rows of a sequence are in GPU memory, so that the "
           "same request has the same bits whatever is copied there; otherwise decode steps on a "
           "runner's stream are dense while that is faster",
           &Config::reproducible),
      Choice(
          "device.mps", "--mps",
          "share GPUs through CUDA MPS, so that kernels of other processes need not wait for their "
          "turn: on starts its control daemon if none runs, auto uses MPS if one runs, off never "
          "uses MPS",
          MpsNames(), [](Config& config, size_t i) { config.mps = static_cast<MpsMode>(i); },
          [](const Config& config) { return ModeName(config.mps); }),
      Choice(
          "device.when_lost", "--when-lost",
          "what to do if a GPU is lost: stay answers with errors; restart starts the daemon again "
          "with its rows and waits for the GPU; cpu does the same, and continues on the CPU if the "
          "GPU does not come back; without --arena-directory all mean stay",
          WhenLostNames(),
          [](Config& config, size_t i) { config.when_lost = static_cast<WhenLost>(i); },
          [](const Config& config) {
            return WhenLostNames()[static_cast<size_t>(config.when_lost)];
          }),
      Integer("device.thread_count", "--threads", "worker threads; 0: one per core",
              &Config::thread_count, 0, 4096),
      Live(Integer("models.count_max", "--model-count-max", "most models at the same time",
                   &Config::model_count_max, 1, std::numeric_limits<int32_t>::max())),
      Integer("models.sampling_seed", "--sampling-seed",
              "seed of the sampling of models whose policy names none; with the same seed, the "
              "same requests give the same results; -1: random, and the same as long as rows "
              "outlive the process",
              &Config::sampling_seed, -1, std::numeric_limits<int64_t>::max()),
      Live(Seconds("sequences.ttl_seconds", "--ttl",
                   "seconds without a call after which a sequence is deleted, unless it has its "
                   "own ttl; 0: never",
                   &Config::ttl_seconds, 365.0 * 86400)),
      Live(Seconds("sequences.unnamed_grace_seconds", "--unnamed-grace",
                   "seconds that a sequence without a name stays after all its clients are gone; "
                   "0: until its ttl ends",
                   &Config::unnamed_grace_seconds, 365.0 * 86400)),
      Live(Integer("sequences.count_max", "--sequence-count-max", "most sequences at the same time",
                   &Config::sequence_count_max, 1, std::numeric_limits<int32_t>::max())),
      Text("snapshots.folder", "--snapshot-folder",
           "absolute path of the folder in which clients may save sequences; /: in any folder; "
           "empty: nowhere",
           &Config::snapshot_folder, IsAbsoluteOrEmpty, "an absolute path or empty"),
      Number(
          "audit.share", "--audit-share",
          "share of the attends that the online audit checks against exact attention; heads that "
          "violate their bounds too often get more rows; 0: no audit",
          &Config::audit_share, [](double value) { return value >= 0 && value <= 1; },
          "a share in [0, 1]"),
      Number(
          "audit.cpu_share", "--audit-cpu-share",
          "most of one core that the audit may use, as a share", &Config::audit_cpu_share,
          [](double value) { return value > 0 && value <= 1; }, "a share in (0, 1]"),
      Live(Choice(
          "log.level", "--log-level", "trace, debug, info, warning, error or off",
          {"trace", "debug", "info", "warning", "error", "off"},
          [](Config& config, size_t i) {
            config.log_level =
                std::vector<std::string>{"trace", "debug", "info", "warning", "error", "off"}[i];
          },
          [](const Config& config) { return config.log_level; })),
      Live(Number(
          "log.slow_attend_ms", "--slow-attend-ms",
          "milliseconds after which an attend at a layer is logged as slow, with the time of each "
          "of its stages; 0: never",
          &Config::slow_attend_ms, [](double value) { return value >= 0 && value <= 86400e3; },
          "a number of milliseconds in [0, 86400000]")),
      Choice(
          "log.format", "--log-format", "text or json", {"text", "json"},
          [](Config& config, size_t i) {
            config.log_format = i == 0 ? LogFormat::kText : LogFormat::kJson;
          },
          [](const Config& config) {
            return config.log_format == LogFormat::kText ? "text" : "json";
          })};
  return *settings;
}

std::string ModeName(MpsMode mode) { return MpsNames()[static_cast<size_t>(mode)]; }

int64_t DefaultMemoryLimit(const Topology& topology) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  return topology.memory_limit_bytes() / 4 * 3 / kMiB * kMiB;
}

absl::Status ApplySetting(const Setting& setting, const std::string& text, const Topology& topology,
                          Config& config) {
  absl::Status status = setting.set(config, text);
  if (status.ok() && setting.key == std::string(kMemoryLimitKey)) {
    status = CheckFits(config.memory_limit_bytes, text, topology);
  }
  return status;
}

absl::Status ApplySetting(const std::string& key, const std::string& text, const Topology& topology,
                          Config& config) {
  for (const Setting& setting : Settings()) {
    if (key != setting.key) continue;
    absl::Status status = ApplySetting(setting, text, topology, config);
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", status.message()));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown key ", key));
}

}  // namespace spillway
