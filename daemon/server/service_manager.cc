#include "daemon/server/service_manager.h"

#include <cstdint>
#include <cstdlib>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#ifdef SPILLWAY_SYSTEMD
#include <systemd/sd-daemon.h>
#endif

namespace spillway {
namespace {

// Each assignment is one line, so line breaks in the value are replaced.
std::string Status(const std::string& status) {
  return absl::StrCat("STATUS=", absl::StrReplaceAll(status, {{"\n", " "}}), "\n");
}

}  // namespace

ServiceManager::ServiceManager() {
#ifdef SPILLWAY_SYSTEMD
  const char* const socket = std::getenv("NOTIFY_SOCKET");
  listens_ = socket != nullptr && *socket != '\0';
  uint64_t interval_us = 0;
  if (listens_ && sd_watchdog_enabled(0, &interval_us) > 0) {
    beat_interval_max_ = absl::Microseconds(static_cast<int64_t>(interval_us));
  }
#endif
}

void ServiceManager::Ready(const std::string& status) const {
  Send(absl::StrCat("READY=1\n", Status(status)));
}

void ServiceManager::Reloading() const {
  // With this time the manager distinguishes the end of this reload from that of an earlier one.
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_us = int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
  Send(absl::StrCat("RELOADING=1\nMONOTONIC_USEC=", now_us, "\n"));
}

void ServiceManager::Stopping(const std::string& status, absl::Duration time) const {
  Send(absl::StrCat("STOPPING=1\n", Status(status),
                    "EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(time), "\n"));
}

void ServiceManager::Beat() const { Send("WATCHDOG=1\n"); }

void ServiceManager::Send([[maybe_unused]] const std::string& assignments) const {
#ifdef SPILLWAY_SYSTEMD
  // Errors are ignored: there is nobody else to report to.
  if (listens_) (void)sd_notify(0, assignments.c_str());
#endif
}

}  // namespace spillway
