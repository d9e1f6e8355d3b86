#include "daemon/server/reload.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "services/log/logging.h"

namespace spillway {

void Reload(const ReadConfig& read, const std::function<void(const Config&)>& apply,
            Config& running) {
  const absl::StatusOr<Config> asked = read();
  if (!asked.ok()) {
    Log(LogLevel::kError, "not_reloaded",
        {{"error", std::string(asked.status().message())}, {"instead", "no setting has changed"}});
    return;
  }
  int changed_count = 0;
  int waiting_count = 0;
  for (const SettingChange& change : ChangesBetween(running, *asked)) {
    if (change.live) {
      ++changed_count;
      LogInfo("setting_changed",
              {{"setting", change.key}, {"from", change.before}, {"to", change.after}});
    } else {
      ++waiting_count;
      Log(LogLevel::kWarning, "setting_needs_restart",
          {{"setting", change.key}, {"running", change.before}, {"asked", change.after}});
    }
  }
  TakeLiveSettings(*asked, running);
  apply(running);
  LogInfo("reloaded", {{"changed", absl::StrCat(changed_count)},
                       {"need_restart", absl::StrCat(waiting_count)}});
}

}  // namespace spillway
