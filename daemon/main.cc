// spillwayd: keeps KV caches in host memory and attends to them.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <iostream>

#include "absl/synchronization/mutex.h"
#include "daemon/config/command_line.h"
#include "daemon/config/config_file.h"
#include "daemon/server/daemon.h"
#include "daemon/server/reflection.h"
#include "host/memory/topology.h"
#include "services/config/config.h"
#include "services/log/library_messages.h"
#include "services/log/logging.h"

#ifdef SPILLWAY_MIMALLOC
#include <mimalloc.h>
#endif

namespace {

// If a standard descriptor is closed, the next file or socket that is opened gets its number, and
// would receive the log.
void OpenStandardDescriptors() {
  int fd = 0;
  while (fd <= STDERR_FILENO) {
    fd = open("/dev/null", O_RDWR);
    if (fd < 0) return;
  }
  close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  OpenStandardDescriptors();
#ifdef SPILLWAY_MIMALLOC
  // Messages of megabytes are allocated and freed often. Return freed memory to the system after 1
  // ms, not after 25 ms.
  mi_option_set_default(mi_option_decommit_delay, 1);
#endif
  // Debian's Abseil checks for deadlocks at every lock, also at gRPC's own locks.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);

  // Blocked before any thread starts, so that all threads leave these signals to sigwait.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGUSR2);
  // SIGHUP makes the daemon read its settings again, or without a settings file ends it in an
  // orderly way, as for a closed terminal. A daemon that was started to ignore it (nohup) ignores
  // it.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  // The reader of the log may end before the daemon does.
  std::signal(SIGPIPE, SIG_IGN);

  const absl::StatusOr<spillway::Topology> topology = spillway::DetectTopology();
  if (!topology.ok()) {
    std::cerr << "spillwayd: " << topology.status().message() << '\n';
    return 1;
  }
  const absl::StatusOr<spillway::CommandLine> line =
      spillway::ParseCommandLine(argc, argv, *topology, SPILLWAY_VERSION);
  if (!line.ok()) {
    std::cerr << "spillwayd: " << line.status().message() << '\n';
    return 2;
  }
  if (!line->message.empty()) {
    (line->exit_code == 0 ? std::cout : std::cerr) << line->message;
    return line->exit_code;
  }
  if (line->print_config) {
    std::cout << spillway::ToToml(line->config);
    return 0;
  }
  spillway::SetUpQueuedLogging(line->config);
  spillway::LogLibraryMessages();
  spillway::EnableReflection();
  spillway::ReadConfig read;
  if (!line->file.empty()) {
    read = [&]() -> absl::StatusOr<spillway::Config> {
      const absl::StatusOr<spillway::CommandLine> again =
          spillway::ParseCommandLine(argc, argv, *topology, SPILLWAY_VERSION);
      if (!again.ok()) return again.status();
      return again->config;
    };
  }
  const int exit_code = spillway::RunDaemon(line->config, *topology, signals, read);
  spillway::WaitUntilLogged();
  return exit_code;
}
