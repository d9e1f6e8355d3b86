#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "host/device/client_gpu.h"
#include "host/device/step_graph.h"

namespace spillway {

// The same as CreateClientGpu; UNIMPLEMENTED in a build without CUDA.
absl::StatusOr<std::unique_ptr<ClientGpu>> MapGpuMemory(const std::string& uuid,
                                                        std::string_view handle);

// A graph of a step on a GPU; the same.
absl::StatusOr<std::unique_ptr<StepGraph>> NewStepGraph();

}  // namespace spillway
