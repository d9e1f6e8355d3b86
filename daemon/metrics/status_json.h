#pragma once

#include <string>

#include "daemon/metrics/metrics.h"

namespace spillway {

// What the status page shows, as a JSON object: the daemon, memory by use, models with what still
// fits and their audits by layer and head, devices, connections, distributions of latencies.
// Counters only rise; the page makes rates of them.
std::string StatusJson(const Metrics& metrics);

}  // namespace spillway
