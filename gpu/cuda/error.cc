#include "gpu/cuda/error.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"

namespace spillway::cuda {

absl::Status ToStatus(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  // The last error of this thread; one that corrupted the context stays.
  cudaGetLastError();
  const std::string message = absl::StrCat(std::string(call), ": ", cudaGetErrorName(error), ", ",
                                           cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

void Report(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  cudaGetLastError();
  std::fprintf(stderr, "spillway: %.*s: %s\n", static_cast<int>(call.size()), call.data(),
               cudaGetErrorString(error));
}

}  // namespace spillway::cuda
