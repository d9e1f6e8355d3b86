#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/kernels/encode.h"
#include "host/codes/mlp.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"

namespace spillway::cuda {

// A model's hash weights in GPU memory and the pools of its code pages and of
// the rows that the GPU holds.
class CudaModel final : public DeviceModel {
 public:
  // weights: MLP layers, empty for other kinds of hash. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Create(const ModelSpec& spec, Arena* arena,
                                                           MemoryBudget* budget,
                                                           const IndexWeights& weights);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

  bool has_codes() const { return spec_.hash.kind != HashKind::kNone; }
  const CodeTiling& tiling() const { return tiling_; }
  PagePool* code_pool() const { return code_pool_.get(); }
  // Of kResidentPageRows rows a page.
  PagePool* row_pool() const { return row_pool_.get(); }
  RotationWeights rotation(int layer) const;
  MlpWeightsView mlp(int layer) const;

 private:
  CudaModel(const ModelSpec& spec, Arena* arena);

  const ModelSpec spec_;
  const CodeTiling tiling_;
  std::unique_ptr<PagePool> code_pool_;
  std::unique_ptr<PagePool> row_pool_;
  DeviceBuffer weights_;  // rotations transposed [L][d][d], or all MLPs' tensors
  std::vector<MlpWeightsView> mlp_;
};

}  // namespace spillway::cuda
