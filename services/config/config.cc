#include "services/config/config.h"

#include <cassert>
#include <set>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"
#include "services/config/settings.h"

namespace spillway {
namespace {

// Settings that an embedded engine does not accept, and why.
constexpr char kListensNowhere[] = "an embedded engine does not listen";
constexpr std::pair<const char*, const char*> kOfDaemons[] = {
    {"server.listen", kListensNowhere},
    {"server.local_socket", kListensNowhere},
    {"server.socket_group", kListensNowhere},
    {"server.allow_remote", kListensNowhere},
    {"tls.certificate", kListensNowhere},
    {"tls.key", kListensNowhere},
    {"tls.client_ca", kListensNowhere},
    {"auth.tokens_file", kListensNowhere},
    {"auth.allow_plaintext", kListensNowhere},
    {"server.grace_seconds", kListensNowhere},
    {"server.connection_count_max", kListensNowhere},
    {"server.stream_count_max", kListensNowhere},
    {"http.listen", kListensNowhere},
    {"device.mps", "an embedded engine uses CUDA as its process does, with MPS or without"},
    {"device.when_lost", "an embedded engine cannot restart its process"}};

}  // namespace

absl::StatusOr<Config> EmbeddedConfig(
    const std::vector<std::pair<std::string, std::string>>& settings, const Topology& topology) {
  Config config;
  config.memory_limit_bytes = DefaultMemoryLimit(topology);
  config.log_level = "error";  // the caller gets refused requests as errors anyway
  config.snapshot_folder = std::string(1, '/');  // the program may use any folder
  std::set<std::string> seen;
  for (const auto& [key, text] : settings) {
    for (const auto& [other, why] : kOfDaemons) {
      if (key != other) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(key, ": ", why, "; this setting is for a daemon"));
    }
    if (!seen.insert(key).second) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": named twice"));
    }
    RETURN_IF_ERROR(ApplySetting(key, text, topology, config));
  }
  return config;
}

std::vector<SettingChange> ChangesBetween(const Config& before, const Config& after) {
  std::vector<SettingChange> changes;
  for (const Setting& setting : Settings()) {
    SettingChange change = {setting.key, setting.get(before), setting.get(after), setting.live};
    if (change.before != change.after) changes.push_back(std::move(change));
  }
  return changes;
}

void TakeLiveSettings(const Config& from, Config& to) {
  for (const Setting& setting : Settings()) {
    if (!setting.live) continue;
    // A setting accepts the text that it returns itself.
    const absl::Status taken = setting.set(to, setting.get(from));
    assert(taken.ok());
    (void)taken;
  }
}

}  // namespace spillway
