#pragma once

#include <csignal>

#include "daemon/server/reload.h"
#include "host/memory/topology.h"
#include "services/config/config.h"

namespace spillway {

// Runs the daemon until one of the signals arrives, then drains it. On SIGHUP it reads its settings
// again, unless `read` is null. Returns the exit code of the process; errors are logged. If rows
// outlive the process, the program replaces it after SIGUSR2 or the loss of a device (Relaunch).
// REQUIRES: the signals are blocked in every thread.
int RunDaemon(const Config& config, const Topology& topology, const sigset_t& signals,
              const ReadConfig& read);

}  // namespace spillway
