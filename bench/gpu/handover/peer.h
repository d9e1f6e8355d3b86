#pragma once

#include "absl/status/status.h"
#include "bench/gpu/handover/shared_page.h"

namespace spillway::bench {

// Runs the peer, the process with the daemon's role. It allocates and exports the GPU memory that
// both processes use, and takes its turn in every round that the runner requests, until the runner
// tells it to stop. `runner`: the process that started this one.
absl::Status RunPeer(int gpu, pid_t runner, SharedPage page);

}  // namespace spillway::bench
