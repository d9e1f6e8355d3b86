#pragma once

#include <optional>

namespace spillway::cuda {

// Whether contexts of this process share the GPU by way of MPS (Multi-Process
// Service): with it kernels of several processes run beside one another,
// without it their contexts take turns. Nothing where the driver does not say.
// The process decides with its first CUDA call, and for good.
std::optional<bool> SharedByMps(int ordinal);

}  // namespace spillway::cuda
