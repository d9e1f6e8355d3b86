#pragma once

#include <csignal>

#include "absl/time/time.h"
#include "daemon/server/network_server.h"
#include "daemon/server/service_manager.h"

namespace spillway {

// Drains the server until no work runs any more, the grace is over, or a second SIGTERM or SIGINT
// arrives. Then stops it. Reports the progress in the log and to the service manager. The manager
// is null if another process will replace this one: then the service does not stop. After a second
// signal, a third one kills the process. REQUIRES: the signals are blocked.
void DrainAndStop(NetworkServer& server, absl::Duration grace, const sigset_t& signals,
                  const ServiceManager* manager);

}  // namespace spillway
