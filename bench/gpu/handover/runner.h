#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/handover/shared_page.h"

namespace spillway::bench {

struct RunnerOptions {
  int gpu = 0;
  uint32_t warm_up_count = 0;  // rounds before those that are timed
  uint32_t round_count = 0;
  int64_t work_ns = 0;  // of the peer's kernel
};

// What one way of handing over has shown.
struct Measured {
  Signal signal = Signal::kPolling;
  // Of each timed round, on the runner's clock: from before its launches until
  // its CPU knows that the turn has come back.
  std::vector<double> seconds;
  std::string unavailable;  // why there is none; empty: there is
};

struct Result {
  std::string gpu_name;
  int driver_version = 0;  // 1000 * major + 10 * minor, the newest CUDA it runs
  bool runner_has_mps = false;
  bool peer_has_mps = false;
  std::vector<Measured> measured;
};

// The process that hands over first. Runs the rounds of every way with `peer`,
// which it has started, and stops it. DATA_LOSS when a kernel did not find what
// the one before it left.
absl::StatusOr<Result> RunRounds(const RunnerOptions& options, pid_t peer, SharedPage* page);

}  // namespace spillway::bench
