// Takes the place of gpu/methods in a build without it.
#include "gpu/device/model_methods.h"
#include "gpu/kernels/methods.h"

namespace spillway::cuda {

const MethodKernels& BuiltMethods() {
  static constexpr MethodKernels kNone;
  return kNone;
}

absl::StatusOr<std::unique_ptr<ModelMethods>> CreateModelMethods(const ModelSpec&,
                                                                 std::span<const std::byte>) {
  return nullptr;
}

int64_t SectionBytes(const ModelSpec&) { return 0; }
int64_t MethodWeightBytes(const ModelSpec&) { return 0; }

}  // namespace spillway::cuda
