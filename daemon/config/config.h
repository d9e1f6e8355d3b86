#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/topology.h"

namespace spillway {

enum class LogFormat { kText, kJson };

// Whether the daemon's GPUs are shared by way of MPS, which lets kernels of
// several processes run beside one another.
enum class MpsMode {
  kOff,   // never
  kAuto,  // where a control daemon answers already
  kOn,    // always: one is started where none answers
};

// "off", "auto" or "on".
std::string ModeName(MpsMode mode);

// What a daemon does that has lost a GPU: CUDA works no more in its process.
enum class WhenLost {
  kStay,     // goes on without it: rows can still be fetched and saved
  kRestart,  // where there is an arena directory takes its own place, and waits for the GPU
  kCpu,      // the same, and goes on with the CPU where the GPU does not come back
};

// What the daemon is told, defaults filled in. Read at the start, and some of it anew later:
// see SettingChange.
struct Config {
  // unix:/path, or tcp:host:port (port 0: any that is free); empty: nowhere.
  std::string listen;
  // unix:/path of a second socket where `listen` is a TCP address, for clients on this machine,
  // who share memory with the daemon by it; empty: none.
  std::string local_socket;
  // Group that may connect to the unix socket, by name or number; empty: none, the
  // daemon's user alone.
  std::string socket_group;
  // Whether a TCP address may be other than loopback.
  bool allow_remote = false;
  // Of TLS on a TCP address, files in PEM: the certificate with those that it rests on, its key,
  // and the authorities of clients' certificates, which are asked for then. Empty: none.
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_client_ca;
  // Of the tokens that calls need (daemon/access/token_file.h); empty: they need none.
  std::string tokens_file;
  // Whether tokens may be asked for in plain text on a TCP address other than loopback.
  bool allow_plaintext_tokens = false;
  // tcp:host:port of the status page and of metrics (port 0: any that is free); empty: none.
  std::string http_listen;
  // Everything the daemon may hold; by default three quarters of the machine's
  // memory, or of the control group's limit.
  int64_t memory_limit_bytes = 0;
  // A folder in memory (tmpfs, hugetlbfs) where K/V rows outlive the process: an absolute path;
  // empty: they go with it.
  std::string arena_directory;
  // "auto" alone: every GPU, or the CPU where there is none; "cpu" alone; or
  // GPUs, each "cuda:N" or its UUID, no name twice.
  std::vector<std::string> devices = {"auto"};
  // Memory of each GPU for codes and workspaces; 0: nine tenths of what is
  // free.
  int64_t gpu_memory_limit_bytes = 0;
  // Of it, for copies of all rows of the sequences that are used; 0: none.
  int64_t gpu_resident_limit_bytes = 0;
  MpsMode mps = MpsMode::kAuto;
  WhenLost when_lost = WhenLost::kRestart;
  // Worker threads; 0: one per core.
  int thread_count = 0;
  // How long a stop waits for running calls.
  double grace_seconds = 10;
  // ttl of sequences that name none; 0: they never expire.
  double ttl_seconds = 3600;
  // How long a sequence that no client has named stays once its clients are gone; 0: until its ttl.
  double unnamed_grace_seconds = 60;
  int64_t sequence_count_max = 65536;
  int64_t model_count_max = 4096;
  // Connections at once; beyond it new ones are closed.
  int connection_count_max = 1024;
  // Calls of one connection at once.
  int stream_count_max = 256;
  // Append, Decode, Fetch and upload streams of all connections at once.
  int open_stream_count_max = 4096;
  // How long the client of an Append or an upload may be silent, and that of a FetchPages read
  // nothing; 0: for ever. Decode streams may always: a runner's waits for the next request.
  double stream_idle_seconds = 300;
  // Messages of one Decode stream in flight.
  int decode_in_flight_max = 32;
  // Where sequences are saved: an absolute path below which clients name folders, "/" where they
  // may name any; empty: nowhere.
  std::string snapshot_folder;
  // Of the attends, the share that is checked against exact attention; 0: none.
  double audit_share = 0;
  // Of one core, what those checks may take.
  double audit_cpu_share = 0.1;
  std::string log_level = "info";
  // From how many milliseconds on a request to attend at a layer is logged as slow; 0: none is.
  double slow_attend_ms = 1000;
  LogFormat log_format = LogFormat::kText;
};

// unix:$XDG_RUNTIME_DIR/spillway/spillwayd.sock, or without that variable
// unix:/tmp/spillway-$UID/spillwayd.sock.
std::string DefaultListen();

// $STATE_DIRECTORY/snapshots (systemd's), $XDG_STATE_HOME/spillway/snapshots or
// $HOME/.local/state/spillway/snapshots, of the first variable that is an absolute path; empty
// where none is.
std::string DefaultSnapshotFolder();

struct CommandLine {
  Config config;
  std::string file;  // that --config names; empty: none
  bool print_config = false;
  // Not empty: print this and exit with exit_code instead of serving.
  std::string message;
  int exit_code = 0;
};

// Flags, over the file that --config names, over the defaults. Unknown keys
// in the file, values that do not parse and values out of range, among them a
// memory limit above what the machine has, are INVALID_ARGUMENT that names
// them; so is MPS that is asked for on the CPU, a group for a TCP address, TLS for a unix socket,
// a certificate without its key, and tokens in plain text beyond loopback that are not allowed.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv,
                                             const Topology& topology, const std::string& version);

// Settings by their names in the file, "memory.limit", and values as text,
// over the defaults, for an engine that is reached from its own process alone:
// `listen` is empty, errors are logged, no more, and snapshots lie where the program says.
// INVALID_ARGUMENT names the setting that is wrong, unknown, named twice, or of no use there.
absl::StatusOr<Config> EmbeddedConfig(
    const std::vector<std::pair<std::string, std::string>>& settings, const Topology& topology);

// A setting of which two configs have different values, as they stand in the file.
struct SettingChange {
  std::string key;  // "memory.limit"
  std::string before;
  std::string after;
  bool live = false;  // it may change while the daemon serves; else with the next start
};
std::vector<SettingChange> ChangesBetween(const Config& before, const Config& after);
// Gives `to` the values of the settings that may change while the daemon serves.
void TakeLiveSettings(const Config& from, Config& to);

// The config as a TOML file that gives the same config.
std::string ToToml(const Config& config);

// "512MiB", "64 GiB", "1048576" to bytes, at least 1.
absl::StatusOr<int64_t> ParseBytes(const std::string& text);
// With the largest suffix that divides the bytes.
std::string FormatBytes(int64_t bytes);

}  // namespace spillway
