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
  uint32_t warm_up_count = 0;  // rounds before the timed ones, per signal
  uint32_t round_count = 0;
  int64_t work_ns = 0;  // how long the peer's kernel spins
};

// The measurement of one kind of signal.
struct Measured {
  Signal signal = Signal::kPolling;
  // For each timed round, on the runner's clock: from before its launches until its CPU sees that
  // the peer has handed back.
  std::vector<double> seconds;
  std::string unavailable;  // why this signal was not measured; empty: it was
};

struct Result {
  std::string gpu_name;
  int driver_version = 0;  // newest CUDA that the driver supports: 1000 * major + 10 * minor
  bool runner_has_mps = false;
  bool peer_has_mps = false;
  std::vector<Measured> measured;
};

// Runs the rounds of every kind of signal with `peer`, a process that this one has started, and
// then tells it to stop. This process hands over first in each round. DATA_LOSS if a kernel did not
// find the value that the kernel before it wrote.
absl::StatusOr<Result> RunRounds(const RunnerOptions& options, pid_t peer, SharedPage* page);

}  // namespace spillway::bench
