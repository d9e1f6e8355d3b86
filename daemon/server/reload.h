#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "services/config/config.h"

namespace spillway {

// Reads the settings again, in the same way as at the start.
using ReadConfig = std::function<absl::StatusOr<Config>()>;

// Reads the settings, and applies those that may change while the daemon serves. Logs each of these
// that changed with "setting_changed", and each changed setting that needs a restart with
// "setting_needs_restart". If the settings cannot be read, logs "not_reloaded" and changes nothing.
// running: the settings in force; updated.
void Reload(const ReadConfig& read, const std::function<void(const Config&)>& apply,
            Config& running);

}  // namespace spillway
