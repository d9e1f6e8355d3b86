#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace spillway::cuda {

// OK, or the error with the name of the call, what it was for and CUDA's own
// words; the runtime's sticky copy of the error is cleared. Out of memory is
// RESOURCE_EXHAUSTED, everything else INTERNAL.
absl::Status ToStatus(cudaError_t error, std::string_view call);

// For destructors: an error is written to stderr, unless it says that the
// process is ending.
void Report(cudaError_t error, std::string_view call);

}  // namespace spillway::cuda

// Returns from the function if a CUDA call fails.
#define SPILLWAY_CUDA_RETURN_IF_ERROR(call)                                                   \
  do {                                                                                        \
    if (const cudaError_t spillway_cuda_error = (call); spillway_cuda_error != cudaSuccess) { \
      return ::spillway::cuda::ToStatus(spillway_cuda_error, #call);                          \
    }                                                                                         \
  } while (false)

// Reports a CUDA call that fails where nothing can be returned.
#define SPILLWAY_CUDA_REPORT(call) ::spillway::cuda::Report((call), #call)
