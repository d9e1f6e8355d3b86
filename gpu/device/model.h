#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/model_methods.h"
#include "gpu/kernels/encode.h"
#include "host/device/copy_layers.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"
#include "host/memory/slab_limit.h"

namespace spillway::cuda {

// A model's hash weights in GPU memory, and the pools of its code pages and of the rows that the
// GPU holds.
class CudaModel final : public DeviceModel {
 public:
  // copy_limit: of the part of the arena for copies of all rows; null: no copies. methods: of this
  // model; null if this build has none. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Create(const ModelSpec& spec, Arena* arena,
                                                           SlabLimit* copy_limit,
                                                           MemoryBudget* budget,
                                                           std::unique_ptr<ModelMethods> methods,
                                                           const CancelToken* cancel = nullptr);

  // Most host memory that Create() takes: each matrix twice, as computed and as packed for the
  // upload.
  static int64_t HostBytesOf(const ModelSpec& spec);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

  // Bytes of an index page: those of CodeTiling, then those of the methods.
  static int64_t IndexPageBytes(const ModelSpec& spec) {
    return CodeTiling::Of(spec).page_bytes() + SectionBytes(spec);
  }
  const CodeTiling& tiling() const { return tiling_; }
  PagePool* code_pool() const { return code_pool_.get(); }
  // Pages of kResidentPageRows rows.
  PagePool* row_pool() const { return row_pool_.get(); }
  // Whether layers have copies of all their rows.
  bool has_copies() const { return copy_limit_ != nullptr; }
  // Pages of kPageTokenCount rows for the copies of a layer; null without copies. Each layer has a
  // pool of its own, so that whole slabs are free for codes when a layer loses its copies.
  PagePool* copy_pool(int layer) const { return has_copies() ? copies_[layer].get() : nullptr; }
  // The layers that have copies.
  CopyLayers& copy_layers() const { return *copy_layers_; }
  // Pages of the copies, for copy_layers(). ahead: see CopyLayers::Pages. REQUIRES: has_copies().
  CopyLayers::Pages CopyPages(int64_t ahead) const;
  bool has_rotation() const { return spec_.hash.kind == HashKind::kRotation; }
  RotationWeights rotation(int layer) const;
  // Sink logits [G] of a group, in GPU memory; null: the model has none.
  const float* sinks(int layer, int group_index) const {
    if (sinks_ == nullptr) return nullptr;
    return sinks_ + int64_t{layer} * spec_.query_head_count + group_index * spec_.group();
  }
  // May be null.
  const ModelMethods* methods() const { return methods_.get(); }
  bool methods_encode() const { return methods_ != nullptr && methods_->encodes(); }
  // Recorded when half of the rows of a long append from GPU memory are copied; the next such
  // append begins then. So one of two concurrent appends ends while the other copies, and the work
  // that follows is prepared meanwhile. Affects only speed.
  cudaEvent_t half_appended() const { return half_appended_.get(); }

 private:
  CudaModel(const ModelSpec& spec, Arena* arena, SlabLimit* copy_limit,
            std::unique_ptr<ModelMethods> methods);

  const ModelSpec spec_;
  const CodeTiling tiling_;
  std::unique_ptr<PagePool> code_pool_;
  std::unique_ptr<PagePool> row_pool_;
  SlabLimit* const copy_limit_;
  std::vector<std::unique_ptr<PagePool>> copies_;
  const std::unique_ptr<CopyLayers> copy_layers_;
  DeviceBuffer weights_;                 // everything below, and the methods' weights
  std::vector<const float*> rotations_;  // transposed [d][d], per layer
  const float* sinks_ = nullptr;         // [layers][query heads]
  const std::unique_ptr<ModelMethods> methods_;
  Event half_appended_;
};

}  // namespace spillway::cuda
