#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/config/config.h"

namespace spillway {

// A setting: its names in the file and on the command line, and the conversion between text and
// value. In the file, numbers and booleans have no quotes.
struct Setting {
  const char* key;  // section.name
  const char* flag;
  const char* help;
  bool quoted;
  std::function<absl::Status(Config&, const std::string&)> set;
  std::function<std::string(const Config&)> get;
  bool is_flag = false;  // it takes no value on the command line
  bool live = false;     // may change on SIGHUP
};

// All settings, by section.
const std::vector<Setting>& Settings();

// Three quarters of the memory that is available. The rest is for the system and for the model
// runner on this machine.
int64_t DefaultMemoryLimit(const Topology& topology);

// Gives a setting the value. INVALID_ARGUMENT, without the setting's name: it does not parse, is
// out of range, or is more memory than is available.
absl::Status ApplySetting(const Setting& setting, const std::string& text, const Topology& topology,
                          Config& config);
// The same for the setting with this key. The error names it; it may be unknown.
absl::Status ApplySetting(const std::string& key, const std::string& text, const Topology& topology,
                          Config& config);

}  // namespace spillway
