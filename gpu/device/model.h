#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/model_methods.h"
#include "gpu/kernels/encode.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"

namespace spillway::cuda {

// A model's hash weights in GPU memory and the pools of its code pages and of
// the rows that the GPU holds.
class CudaModel final : public DeviceModel {
 public:
  // resident_arena: of whole sequences' rows, may be null. methods: the model's,
  // null if this build has none. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Create(const ModelSpec& spec, Arena* arena,
                                                           Arena* resident_arena,
                                                           MemoryBudget* budget,
                                                           std::unique_ptr<ModelMethods> methods,
                                                           const CancelToken* cancel = nullptr);

  // Host memory that Create() takes, at most: each matrix twice, as it is made
  // and packed for the copy to the GPU.
  static int64_t HostBytesOf(const ModelSpec& spec);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

  // Of an index page: what CodeTiling says and what methods keep behind it.
  static int64_t IndexPageBytes(const ModelSpec& spec) {
    return CodeTiling::Of(spec).page_bytes() + SectionBytes(spec);
  }
  const CodeTiling& tiling() const { return tiling_; }
  PagePool* code_pool() const { return code_pool_.get(); }
  // Of kResidentPageRows rows a page.
  PagePool* row_pool() const { return row_pool_.get(); }
  // Of kPageTokenCount rows a page; null where no sequence is held whole.
  PagePool* whole_pool() const { return whole_pool_.get(); }
  bool has_rotation() const { return spec_.hash.kind == HashKind::kRotation; }
  RotationWeights rotation(int layer) const;
  // May be null.
  const ModelMethods* methods() const { return methods_.get(); }
  bool methods_encode() const { return methods_ != nullptr && methods_->encodes(); }
  // Recorded when half of a long append's rows from GPU memory are copied: the next one's
  // begin then. So of two that are on their way together one ends while the other
  // copies, and what follows it is prepared meanwhile. Nothing but speed depends on it.
  cudaEvent_t half_appended() const { return half_appended_.get(); }

 private:
  CudaModel(const ModelSpec& spec, Arena* arena, Arena* resident_arena,
            std::unique_ptr<ModelMethods> methods);

  const ModelSpec spec_;
  const CodeTiling tiling_;
  std::unique_ptr<PagePool> code_pool_;
  std::unique_ptr<PagePool> row_pool_;
  std::unique_ptr<PagePool> whole_pool_;
  DeviceBuffer weights_;                 // everything below, and what the methods added
  std::vector<const float*> rotations_;  // transposed [d][d], per layer
  const std::unique_ptr<ModelMethods> methods_;
  Event half_appended_;
};

}  // namespace spillway::cuda
