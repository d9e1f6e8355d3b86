#pragma once

#include <csignal>

#include "daemon/config/config.h"
#include "daemon/server/reload.h"
#include "host/memory/topology.h"

namespace spillway {

// Serves until one of the signals comes, then drains; SIGHUP has it read its settings again, unless
// `read` is null. Returns the process's exit code; errors are logged. After SIGUSR2, and where a
// device is lost, another process of the same program takes this one's place, where rows outlive
// it (Relaunch). REQUIRES: the signals are blocked in every thread.
int RunDaemon(const Config& config, const Topology& topology, const sigset_t& signals,
              const ReadConfig& read);

}  // namespace spillway
