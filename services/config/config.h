#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/topology.h"

namespace spillway {

enum class LogFormat { kText, kJson };

// Whether the daemon's GPUs are shared through MPS, which lets kernels of several processes run at
// the same time.
enum class MpsMode {
  kOff,   // never
  kAuto,  // if a control daemon answers already
  kOn,    // always; starts a control daemon if none answers
};

// "off", "auto" or "on".
std::string ModeName(MpsMode mode);

// What the daemon does if it loses a GPU. CUDA does not work any more in its process then.
enum class WhenLost {
  kStay,     // keeps running without the GPU: rows can still be fetched and saved
  kRestart,  // if there is an arena directory, restarts in place and waits for the GPU
  kCpu,      // the same, but continues on the CPU if the GPU does not come back
};

// The settings of the daemon, with defaults filled in. Read at the start; some may change later,
// see SettingChange.
struct Config {
  // unix:/path, or tcp:host:port (port 0: any free port); empty: the daemon listens nowhere.
  // Default: host/base/default_socket.h.
  std::string listen;
  // unix:/path of a second socket, if `listen` is a TCP address. Clients on this machine use it to
  // share memory with the daemon. Empty: none.
  std::string local_socket;
  // Group that may connect to the unix socket, by name or number. Empty: only the daemon's user
  // may.
  std::string socket_group;
  // Whether TCP addresses other than loopback are allowed.
  bool allow_remote = false;
  // Files for TLS on the TCP address, in PEM: the certificate with its intermediate certificates,
  // its key, and the authorities that sign clients' certificates, which clients then need. Empty:
  // none.
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_client_ca;
  // File with the tokens that calls need (daemon/access/token_file.h). Empty: calls need no token.
  std::string tokens_file;
  // Whether tokens are allowed without TLS on TCP addresses other than loopback.
  bool allow_plaintext_tokens = false;
  // tcp:host:port of the status page and the metrics (port 0: any free port); empty: none.
  std::string http_listen;
  // Limit on all host memory of the daemon. By default three quarters of the machine's memory, or
  // of the limit of its control group or process.
  int64_t memory_limit_bytes = 0;
  // Host memory that is committed at the start and kept; no more than the limit leaves for rows.
  int64_t memory_ready_bytes = 0;
  // Absolute path of a tmpfs or hugetlbfs folder in which K/V rows outlive the process. Empty: they
  // end with the process.
  std::string arena_directory;
  // Either only "auto" (all GPUs, or the CPU if there are none), or only "cpu", or a list of GPUs,
  // each "cuda:N" or its UUID, without duplicates.
  std::vector<std::string> devices = {"auto"};
  // Memory of each GPU for codes and workspaces; 0: nine tenths of the free memory.
  int64_t gpu_memory_limit_bytes = 0;
  // The most of it for copies of all rows of sequences in use; 0: no copies; nullopt: as much as
  // codes leave of a gpu_memory_limit_bytes that is set, and no copies if it is not set.
  std::optional<int64_t> gpu_resident_limit_bytes;
  // The part of it that codes and copies leave to workspaces; 0: by the limit.
  int64_t gpu_workspace_bytes = 0;
  // Whether answers do not depend on which copies there are.
  bool reproducible = false;
  MpsMode mps = MpsMode::kAuto;
  WhenLost when_lost = WhenLost::kRestart;
  // Worker threads; 0: one per core.
  int thread_count = 0;
  // How long a stopping daemon waits for running calls.
  double grace_seconds = 10;
  // The ttl of sequences that name none; 0: they never expire.
  double ttl_seconds = 3600;
  // How long a sequence whose name no client chose stays after its clients are gone; 0: until its
  // ttl ends.
  double unnamed_grace_seconds = 60;
  int64_t sequence_count_max = 65536;
  int64_t model_count_max = 4096;
  // Seed of the sampling of models whose policy names none; -1: random.
  int64_t sampling_seed = -1;
  // Most connections at the same time; further ones are closed.
  int connection_count_max = 1024;
  // Most calls of one connection at the same time.
  int stream_count_max = 256;
  // Most append, step, fetch and upload streams of all connections at the same time.
  int open_stream_count_max = 4096;
  // How long the client of an Append or an upload may send nothing, and the client of a FetchPages
  // may read nothing, and the client of a Step that has begun a layer; 0: forever. Between layers a
  // Step stream may be idle, because a runner computes.
  double stream_idle_seconds = 300;
  // Where sequences are saved: the absolute path of a folder, below which clients name subfolders.
  // "/": clients may name any folder. Empty: nowhere.
  std::string snapshot_folder;
  // Share of the attends that the audit checks against exact attention; 0: no audit.
  double audit_share = 0;
  // Share of one core that the audit may use.
  double audit_cpu_share = 0.1;
  std::string log_level = "info";
  // Requests to attend at a layer that take at least so many milliseconds are logged as slow; 0:
  // none.
  double slow_attend_ms = 1000;
  LogFormat log_format = LogFormat::kText;
};

// The config of an embedded engine. settings: names as in the file, such as "memory.limit", and
// values as text; they override the defaults. `listen` is empty, only errors are logged by default,
// and snapshots may be in any folder. INVALID_ARGUMENT names a setting that is wrong, unknown,
// named twice, or only for daemons.
absl::StatusOr<Config> EmbeddedConfig(
    const std::vector<std::pair<std::string, std::string>>& settings, const Topology& topology);

// A setting that differs between two configs, with both values as in the file.
struct SettingChange {
  std::string key;  // "memory.limit"
  std::string before;
  std::string after;
  bool live = false;  // may change while the daemon serves; otherwise needs a restart
};
std::vector<SettingChange> ChangesBetween(const Config& before, const Config& after);
// Copies the settings that may change while the daemon serves from `from` to `to`.
void TakeLiveSettings(const Config& from, Config& to);

// Parses "512MiB", "64 GiB" or "1048576" to bytes, at least 1.
absl::StatusOr<int64_t> ParseBytes(const std::string& text);
// Formats bytes with the largest unit that divides them.
std::string FormatBytes(int64_t bytes);

}  // namespace spillway
