#include "gpu/device/step_checks.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

// Alignment of rows that kernels read.
constexpr int64_t kAlignment = 16;

absl::Status CheckOfStep(int ordinal, const char* name, const void* data) {
  cudaPointerAttributes attributes{};
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaPointerGetAttributes(&attributes, data));
  const bool on_gpu = attributes.type == cudaMemoryTypeDevice;
  if ((on_gpu && attributes.device == ordinal) || attributes.type == cudaMemoryTypeManaged) {
    return absl::OkStatus();
  }
  if (!on_gpu) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": is not in the memory of cuda:", ordinal));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": is in the memory of cuda:", attributes.device, ", not of cuda:", ordinal));
}

}  // namespace

absl::Status CheckStepTensors(int ordinal, const StepTensors& tensors) {
  for (const auto& [name, place] :
       {std::pair("q", &tensors.q), std::pair("k", &tensors.k), std::pair("v", &tensors.v)}) {
    RETURN_IF_ERROR(CheckOfStep(ordinal, name, place->data));
    const int64_t together = reinterpret_cast<intptr_t>(place->data) | place->sequence_stride |
                             place->token_stride | place->head_stride;
    if (together % kAlignment == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": rows are not aligned to ", kAlignment, " bytes"));
  }
  RETURN_IF_ERROR(CheckOfStep(ordinal, "out", tensors.out.data));
  return tensors.lse == nullptr ? absl::OkStatus() : CheckOfStep(ordinal, "lse", tensors.lse);
}

}  // namespace spillway::cuda
