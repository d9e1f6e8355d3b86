#pragma once

#include "absl/status/status.h"
#include "bench/gpu/handover/shared_page.h"

namespace spillway::bench {

// The other process: makes and exports the GPU memory that both use, as a daemon
// would, and takes its turn in every round that the runner asks for, until it is
// told to stop. `runner`: the process that started this one.
absl::Status RunPeer(int gpu, pid_t runner, SharedPage page);

}  // namespace spillway::bench
