#include "gpu/cuda/current_device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "gpu/cuda/error.h"

namespace spillway::cuda {
namespace {

// The driver's function of this name, or null. The program does not link libcuda.
template <typename Function>
Function DriverFunction(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  SPILLWAY_CUDA_REPORT(
      cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &result));
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(entry) : nullptr;
}

// cudaGetDevice() returns GPU 0 for a thread that has none, and setting GPU 0 would create its
// context. So the contexts themselves are saved and restored.
struct Contexts {
  decltype(&cuCtxGetCurrent) get = DriverFunction<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  decltype(&cuCtxSetCurrent) set = DriverFunction<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");

  static const Contexts& Of() {
    static const Contexts contexts;
    return contexts;
  }
};

}  // namespace

CurrentDevice::CurrentDevice(int ordinal) {
  const Contexts& contexts = Contexts::Of();
  if (contexts.get == nullptr || contexts.set == nullptr) {
    status_ = absl::UnimplementedError("the CUDA driver has no cuCtxGetCurrent");
    return;
  }
  CUcontext before = nullptr;
  contexts.get(&before);
  before_ = before;
  status_ = ToStatus(cudaSetDevice(ordinal), "cudaSetDevice");
  if (!status_.ok()) return;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  SPILLWAY_CUDA_REPORT(cudaThreadExchangeStreamCaptureMode(&mode));
  mode_ = mode;
}

CurrentDevice::~CurrentDevice() {
  if (mode_.has_value()) {
    auto mode = static_cast<cudaStreamCaptureMode>(*mode_);
    SPILLWAY_CUDA_REPORT(cudaThreadExchangeStreamCaptureMode(&mode));
  }
  if (Contexts::Of().set != nullptr) Contexts::Of().set(static_cast<CUcontext>(before_));
}

}  // namespace spillway::cuda
