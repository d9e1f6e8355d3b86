#pragma once

#include <string>

#include "absl/status/status.h"
#include "services/config/config.h"

namespace spillway {

// Overrides the settings that a TOML file names. INVALID_ARGUMENT names an unknown key, or a value
// that does not parse or is out of range.
absl::Status ReadConfigFile(const std::string& path, const Topology& topology, Config& config);

// A TOML file that yields the same config.
std::string ToToml(const Config& config);

}  // namespace spillway
