#pragma once

#include <memory>

#include "daemon/server/mps.h"

namespace spillway {

// MPS as NVIDIA's driver provides it: the program nvidia-cuda-mps-control in PATH. Its clients find
// the control daemon in CUDA_MPS_PIPE_DIRECTORY, or in /tmp/nvidia-mps if that is not set.
std::unique_ptr<MpsSystem> CreateMpsSystem();

}  // namespace spillway
