#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace spillway::cuda {

// OK, or an error with the name of the call and CUDA's name and text of the error. Clears the
// runtime's last error of this thread. Out of memory is RESOURCE_EXHAUSTED, everything else
// INTERNAL.
absl::Status ToStatus(cudaError_t error, std::string_view call);

// For destructors: writes an error to stderr, unless the error is that the process is ending.
void Report(cudaError_t error, std::string_view call);

}  // namespace spillway::cuda

// Returns from the function if a CUDA call fails.
#define SPILLWAY_CUDA_RETURN_IF_ERROR(call)                                                   \
  do {                                                                                        \
    if (const cudaError_t spillway_cuda_error = (call); spillway_cuda_error != cudaSuccess) { \
      return ::spillway::cuda::ToStatus(spillway_cuda_error, #call);                          \
    }                                                                                         \
  } while (false)

// Reports the error of a CUDA call where no status can be returned.
#define SPILLWAY_CUDA_REPORT(call) ::spillway::cuda::Report((call), #call)
