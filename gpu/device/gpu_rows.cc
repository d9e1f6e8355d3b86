#include "gpu/device/gpu_rows.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kAlignment = 16;

}  // namespace

absl::Status CheckInGpu(const Gpu& gpu, std::string_view name, const void* address) {
  cudaPointerAttributes attributes{};
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaPointerGetAttributes(&attributes, address));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device == gpu.ordinal) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(name), " is not in the memory of ", std::string(gpu.name)));
}

absl::Status CheckAligned(std::string_view name, const void* data, int64_t head_stride,
                          int64_t token_stride) {
  const int64_t together = reinterpret_cast<intptr_t>(data) | head_stride | token_stride;
  if (together % kAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rows of ", std::string(name), " are not aligned to ", kAlignment, " bytes"));
}

}  // namespace spillway::cuda
