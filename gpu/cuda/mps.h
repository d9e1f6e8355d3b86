#pragma once

#include <optional>

namespace spillway::cuda {

// Whether this process uses the GPU through MPS (Multi-Process Service). With MPS, kernels of
// several processes run at the same time; without it, the processes take turns. No value if the
// driver does not say. The first CUDA call of the process decides this permanently.
std::optional<bool> SharedByMps(int ordinal);

}  // namespace spillway::cuda
