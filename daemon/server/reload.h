#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"

namespace spillway {

// Reads the settings anew, as at the start.
using ReadConfig = std::function<absl::StatusOr<Config>()>;

// Reads the settings and has those applied that may change while the daemon serves. Logs each
// that changed, with "setting_changed", and each that waits for the next start, with
// "setting_needs_restart"; where they cannot be read, logs "not_reloaded" and changes nothing.
// running: what is in force, which becomes what is in force then.
void Reload(const ReadConfig& read, const std::function<void(const Config&)>& apply,
            Config& running);

}  // namespace spillway
