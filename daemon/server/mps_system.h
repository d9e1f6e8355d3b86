#pragma once

#include <memory>

#include "daemon/server/mps.h"

namespace spillway {

// The system that NVIDIA's driver comes with: nvidia-cuda-mps-control, found in
// PATH, which meets its clients in CUDA_MPS_PIPE_DIRECTORY (/tmp/nvidia-mps where
// that is not set).
std::unique_ptr<MpsSystem> CreateMpsSystem();

}  // namespace spillway
