#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "engine/engine.h"
#include "engine/regions.h"
#include "oneapi/tbb/task_arena.h"
#include "services/authenticator.h"
#include "services/call_limits.h"
#include "services/call_threads.h"
#include "services/convert/status.h"
#include "services/doorbell/doorbell_server.h"
#include "services/drain_state.h"
#include "services/metrics/call_counters.h"
#include "services/metrics/metrics.h"
#include "services/stream_set.h"
#include "services/waiting_calls.h"

namespace spillway {

// What every service needs. Must outlive the services.
struct ServiceContext {
  Engine& engine;
  // The client of every call of a server that only its own process can reach. Null: each call names
  // its client.
  std::shared_ptr<Presence> own_client;
  // Who may call. Null: calls need no token.
  const Authenticator* tokens;
  const StatusConverter& status;
  StreamSet& streams;
  // Calls whose requests have not arrived: those with a token if tokens are required, and those of
  // methods that need none.
  WaitingCalls& waiting;
  WaitingCalls& public_waiting;
  RegionTable& regions;
  DoorbellServer& doorbells;
  // Runs work that takes long (filling the pages of regions, uploaded weights), so that it does not
  // delay the threads that serve calls.
  tbb::task_arena& background;
  CallCounters& calls;
  const Metrics& metrics;
  // For calls that save or load sequences.
  CallThreads& file_threads;
  // For calls that create models: computing the rotations may take half a minute.
  CallThreads& model_threads;
  const DrainState& drain;
  std::string version;
  std::string boot_id;
  absl::Time start_time;
  const CallLimits& limits;
  std::string region_socket;    // file name, in the folder of the server's own socket; empty: none
  std::string snapshot_folder;  // the setting snapshots.folder; empty: none
};

}  // namespace spillway
