#include "lib/gpu.h"

#ifdef SPILLWAY_HAS_CUDA
#include "gpu/client/client_gpu.h"
#include "gpu/device/step_graph.h"
#endif

namespace spillway {

absl::StatusOr<std::unique_ptr<ClientGpu>> MapGpuMemory(const std::string& uuid,
                                                        std::string_view handle) {
#ifdef SPILLWAY_HAS_CUDA
  return CreateClientGpu(uuid, handle);
#else
  static_cast<void>(uuid);
  static_cast<void>(handle);
  return absl::UnimplementedError(
      "this libspillway was built without CUDA: it cannot map GPU memory");
#endif
}

absl::StatusOr<std::unique_ptr<StepGraph>> NewStepGraph() {
#ifdef SPILLWAY_HAS_CUDA
  return std::make_unique<cuda::CudaStepGraph>();
#else
  return absl::UnimplementedError("this libspillway was built without CUDA: it has no CUDA graphs");
#endif
}

}  // namespace spillway
