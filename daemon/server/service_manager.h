#pragma once

#include <string>

#include "absl/time/time.h"

namespace spillway {

// Limit on the time to free memory after the last call. The memory is pinned and in huge pages.
constexpr absl::Duration kGiveBackTime = absl::Minutes(1);

// Reports the state of the daemon to the service manager that started it (systemd), through the
// socket $NOTIFY_SOCKET. Does nothing if the variable is not set, or in builds without libsystemd.
// Thread-safe.
class ServiceManager {
 public:
  // Reads the environment.
  ServiceManager();

  // Whether $NOTIFY_SOCKET is set.
  bool listens() const { return listens_; }
  // The longest time between two beats; after that the manager kills the process. Infinite if no
  // beats are expected.
  absl::Duration beat_interval_max() const { return beat_interval_max_; }

  // The daemon serves, for the first time or after Reloading(). status: a line for people.
  void Ready(const std::string& status) const;
  // The daemon reads its settings again.
  void Reloading() const;
  // The daemon is stopping. It calls this again, or ends, within `time`.
  void Stopping(const std::string& status, absl::Duration time) const;
  void Beat() const;

 private:
  void Send(const std::string& assignments) const;

  bool listens_ = false;
  absl::Duration beat_interval_max_ = absl::InfiniteDuration();
};

}  // namespace spillway
