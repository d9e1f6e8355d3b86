#pragma once

#include <string>

#include "services/metrics/metrics.h"

namespace spillway {

// The content of the status page as a JSON object: the daemon, memory by use, models with their
// free tokens and their audits by layer and head, devices, connections, and distributions of
// latencies. Counters only increase; the page computes rates from them.
std::string StatusJson(const Metrics& metrics);

}  // namespace spillway
