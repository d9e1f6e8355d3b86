#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "daemon/access/token_table.h"
#include "daemon/convert/status.h"
#include "daemon/doorbell/doorbell_server.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/regions.h"
#include "daemon/metrics/call_counters.h"
#include "daemon/metrics/metrics.h"
#include "daemon/services/call_limits.h"
#include "daemon/services/call_threads.h"
#include "daemon/services/drain_state.h"
#include "daemon/services/stream_set.h"
#include "oneapi/tbb/task_arena.h"

namespace spillway {

// What every service needs; outlives them.
struct ServiceContext {
  Engine& engine;
  // Of a server that is reached from its own process alone: every call's client. Null: calls say
  // which they are of.
  std::shared_ptr<Presence> own_client;
  // Who may call; null: whoever connects.
  const TokenTable* tokens;
  const StatusConverter& status;
  StreamSet& streams;
  RegionTable& regions;
  DoorbellServer& doorbells;
  // Runs what takes its time (regions' pages, uploaded weights), so that it does
  // not hold up the threads that serve calls.
  tbb::task_arena& background;
  CallCounters& calls;
  const Metrics& metrics;
  // Of calls that wait for files.
  CallThreads& file_threads;
  // Of calls that create models, whose rotations may take half a minute.
  CallThreads& model_threads;
  const DrainState& drain;
  std::string version;
  std::string boot_id;
  absl::Time start_time;
  const CallLimits& limits;
  std::string region_socket;    // beside the server's own; empty: none
  std::string snapshot_folder;  // as the setting; empty: none
};

}  // namespace spillway
