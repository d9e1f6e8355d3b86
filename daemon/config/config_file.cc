#include "daemon/config/config_file.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "daemon/config/toml_text.h"
#include "daemon/config/watched_file.h"
#include "host/base/status_macros.h"
#include "services/config/settings.h"
#include "toml.hpp"

namespace spillway {
namespace {

constexpr int64_t kConfigFileBytesMax = int64_t{1} << 20;

std::string ValueText(const toml::value& value) {
  if (value.is_string()) return value.as_string().str;
  if (value.is_integer()) return absl::StrCat(value.as_integer());
  if (value.is_floating()) return absl::StrCat(value.as_floating());
  if (value.is_boolean()) return value.as_boolean() ? "true" : "false";
  return "a value that is not a string, a number or a boolean";
}

}  // namespace

absl::Status ReadConfigFile(const std::string& path, const Topology& topology, Config& config) {
  ASSIGN_OR_RETURN(const RegularFile read,
                   WatchedFile(path, kConfigFileBytesMax).Read(WatchedFile::kNeeded));
  ASSIGN_OR_RETURN(const toml::value file, ParseToml(read.text, path));
  for (const auto& [section, value] : file.as_table()) {
    if (!value.is_table()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": unknown key ", section));
    }
    for (const auto& [name, inner] : value.as_table()) {
      absl::Status status =
          ApplySetting(absl::StrCat(section, ".", name), ValueText(inner), topology, config);
      if (!status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
      }
    }
  }
  return absl::OkStatus();
}

std::string ToToml(const Config& config) {
  std::string text;
  std::string section;
  for (const Setting& setting : Settings()) {
    const std::string key = setting.key;
    const size_t dot = key.find('.');
    if (key.substr(0, dot) != section) {
      absl::StrAppend(&text, section.empty() ? "" : "\n", "[", key.substr(0, dot), "]\n");
      section = key.substr(0, dot);
    }
    const std::string value = setting.get(config);
    absl::StrAppend(&text, key.substr(dot + 1), " = ");
    if (setting.quoted) {
      toml::value quoted(value);
      absl::StrAppend(&text, toml::format(quoted, 1 << 16), "\n");
    } else {
      absl::StrAppend(&text, value, "\n");
    }
  }
  return text;
}

}  // namespace spillway
