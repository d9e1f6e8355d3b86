#include "gpu/cuda/error.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"

namespace spillway::cuda {
namespace {

// Whether CUDA cannot be used any more: every later call of this process fails.
bool EndsTheProcess(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorMpsClientTerminated:
      return true;
    default:
      return false;
  }
}

}  // namespace

absl::Status ToStatus(cudaError_t error, std::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  // Clears the thread's last error. An error that corrupted the context remains.
  cudaGetLastError();
  const std::string message = absl::StrCat(
      std::string(call), ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error),
      EndsTheProcess(error) ? ": CUDA works no more in this process" : "");
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
