#include "daemon/config/command_line.h"

#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "daemon/config/config_file.h"
#include "daemon/config/socket_path.h"
#include "host/base/default_socket.h"
#include "host/base/status_macros.h"
#include "services/config/settings.h"

namespace spillway {
namespace {

absl::Status CheckMps(const Config& config) {
  if (config.mps != MpsMode::kOn || config.devices != std::vector<std::string>{"cpu"}) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "--mps (device.mps) is on and --device (device.name) is cpu: MPS is for GPUs; name a GPU, or "
      "omit --mps");
}

absl::Status CheckLocalSocket(const Config& config) {
  if (config.local_socket.empty() || config.listen.starts_with("tcp:")) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--local-socket (server.local_socket) is ", config.local_socket,
      " and --listen (server.listen) is ", config.listen,
      ": a second socket is only for a daemon that listens on a TCP address; omit it"));
}

absl::Status CheckSocketGroup(const Config& config) {
  if (config.socket_group.empty() || !config.listen.starts_with("tcp:") ||
      !config.local_socket.empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--socket-group (server.socket_group) is \"", config.socket_group,
                   "\" and --listen (server.listen) is ", config.listen,
                   ": a group is only for a unix socket; omit it"));
}

absl::Status CheckTls(const Config& config) {
  if (config.tls_certificate.empty() != config.tls_key.empty()) {
    return absl::InvalidArgumentError(
        "tls.certificate (--tls-certificate) and tls.key (--tls-key) must both be set: one of them "
        "is empty");
  }
  if (config.tls_certificate.empty() && !config.tls_client_ca.empty()) {
    return absl::InvalidArgumentError(
        "tls.client_ca (--tls-client-ca) is set without tls.certificate (--tls-certificate)");
  }
  if (config.tls_certificate.empty() || config.listen.starts_with("tcp:")) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tls.certificate (--tls-certificate) is set and --listen (server.listen) is ",
                   config.listen, ": TLS is only for a TCP address; omit it"));
}

absl::Status CheckTokens(const Config& config) {
  if (config.tokens_file.empty() || !config.listen.starts_with("tcp:") ||
      !config.tls_certificate.empty() || config.allow_plaintext_tokens ||
      IsLoopback(config.listen.substr(4))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "auth.tokens_file (--tokens-file) is set and --listen (server.listen) is ", config.listen,
      " without TLS: others on the network could read the tokens; set tls.certificate, or "
      "auth.allow_plaintext (--allow-plaintext-tokens)"));
}

}  // namespace

std::string DefaultSnapshotFolder() {
  for (const auto& [variable, below] : {std::pair("STATE_DIRECTORY", "/snapshots"),
                                        std::pair("XDG_STATE_HOME", "/spillway/snapshots"),
                                        std::pair("HOME", "/.local/state/spillway/snapshots")}) {
    const char* folder = std::getenv(variable);
    if (folder == nullptr || *folder != '/') continue;
    // systemd separates several by colons; use the first.
    return absl::StrCat(std::string(folder).substr(0, std::string(folder).find(':')), below);
  }
  return "";
}

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv,
                                             const Topology& topology, const std::string& version) {
  CommandLine line;
  line.config.listen = absl::StrCat("unix:", DefaultSocketPath());
  line.config.snapshot_folder = DefaultSnapshotFolder();
  line.config.memory_limit_bytes = DefaultMemoryLimit(topology);

  CLI::App app("Daemon that keeps KV caches in host memory and computes attention over them.",
               "spillwayd");
  app.footer(
      "SIGTERM and SIGINT end the daemon: it accepts no new calls and waits at most --grace\n"
      "seconds for running ones. After SIGHUP the daemon reads the file of --config again, and\n"
      "uses the new values of the settings that are marked (SIGHUP). Without a file SIGHUP ends\n"
      "the daemon too. Under nohup it is ignored.");
  std::string& path = line.file;
  app.add_option("--config", path,
                 "TOML file with settings; options on the command line override it");
  app.add_flag("--print-config", line.print_config,
               "print all settings with their values and exit");
  app.set_version_flag("--version", version);
  std::map<std::string, std::string> flags;
  for (const Setting& setting : Settings()) {
    const auto take = [&flags, key = std::string(setting.key)](const std::string& text) {
      flags[key] = text;
    };
    const std::string help = absl::StrCat(setting.help, setting.live ? " (SIGHUP)" : "");
    if (setting.is_flag) {
      app.add_flag_function(
          setting.flag, [take](int64_t count) { take(count > 0 ? "true" : "false"); }, help);
    } else {
      app.add_option_function<std::string>(setting.flag, take, help);
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out;
    // Not the parser's own exit codes, but 2 for any wrong command line, as usual.
    line.exit_code = app.exit(error, out, out) == 0 ? 0 : 2;
    line.message = out.str();
    return line;
  }
  if (!path.empty()) {
    RETURN_IF_ERROR(ReadConfigFile(path, topology, line.config));
  }
  for (const Setting& setting : Settings()) {
    const auto flag = flags.find(setting.key);
    if (flag == flags.end()) continue;
    absl::Status status = ApplySetting(setting, flag->second, topology, line.config);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(setting.flag, ": ", status.message()));
    }
  }
  RETURN_IF_ERROR(CheckMps(line.config));
  RETURN_IF_ERROR(CheckLocalSocket(line.config));
  RETURN_IF_ERROR(CheckSocketGroup(line.config));
  RETURN_IF_ERROR(CheckTls(line.config));
  RETURN_IF_ERROR(CheckTokens(line.config));
  return line;
}

}  // namespace spillway
