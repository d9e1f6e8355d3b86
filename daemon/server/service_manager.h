#pragma once

#include <string>

#include "absl/time/time.h"

namespace spillway {

// What giving memory back takes at most, after the last call: it is pinned, and in huge pages.
constexpr absl::Duration kGiveBackTime = absl::Minutes(1);

// Tells the service manager that started the process (systemd) how the daemon fares, through the
// socket $NOTIFY_SOCKET. Says nothing where that is not set, and in builds without libsystemd.
// Thread-safe.
class ServiceManager {
 public:
  // Reads the environment.
  ServiceManager();

  // Whether something listens.
  bool listens() const { return listens_; }
  // The longest between two beats, after which the process is killed; infinite: nobody minds.
  absl::Duration beat_interval_max() const { return beat_interval_max_; }

  // The daemon serves, for the first time or after Reloading. status: a line for people.
  void Ready(const std::string& status) const;
  // It reads its settings again.
  void Reloading() const;
  // It ends, and takes `time` at most until it says so again or is gone.
  void Stopping(const std::string& status, absl::Duration time) const;
  void Beat() const;

 private:
  void Send(const std::string& assignments) const;

  bool listens_ = false;
  absl::Duration beat_interval_max_ = absl::InfiniteDuration();
};

}  // namespace spillway
