#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "toml.hpp"

namespace spillway {

// Parses TOML that others may have written. name: of the file, for errors. INVALID_ARGUMENT, with
// the name, if it is not TOML, or too much for the parser: arrays, tables or dotted keys that are
// nested deeper than its stack, or lines of kilobytes, which take it minutes.
absl::StatusOr<toml::value> ParseToml(const std::string& text, const std::string& name);

}  // namespace spillway
