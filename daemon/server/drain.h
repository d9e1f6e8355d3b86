#pragma once

#include <csignal>

#include "absl/time/time.h"
#include "daemon/server/server.h"
#include "daemon/server/service_manager.h"

namespace spillway {

// Drains the server until nothing runs any more, the grace is over, or one of the signals comes
// again, and stops it. Says in the log how far that is, and to the service manager unless that is
// null: the service does not stop where another process takes this one's place. After a second
// signal a third ends the process where it stands. REQUIRES: the signals are blocked.
void DrainAndStop(Server& server, absl::Duration grace, const sigset_t& signals,
                  const ServiceManager* manager);

}  // namespace spillway
