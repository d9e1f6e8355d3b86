#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/kernels/encode.h"
#include "gpu/kernels/sections.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"
#include "host/methods/weights/index_weights.h"

namespace spillway::cuda {

// A model's hash weights in GPU memory and the pools of its code pages and of
// the rows that the GPU holds.
class CudaModel final : public DeviceModel {
 public:
  // weights: MLP layers, empty for other kinds of hash. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Create(const ModelSpec& spec, Arena* arena,
                                                           MemoryBudget* budget,
                                                           const IndexWeights& weights);

  // Host memory that Create() takes, at most: each matrix twice, as it is made
  // and packed for the copy to the GPU.
  static int64_t HostBytesOf(const ModelSpec& spec);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

  const CodeTiling& tiling() const { return tiling_; }
  // Of an index page: codes and the sections behind them.
  int64_t page_bytes() const { return tiling_.page_bytes() + sections_.bytes(); }
  PagePool* code_pool() const { return code_pool_.get(); }
  // Of kResidentPageRows rows a page.
  PagePool* row_pool() const { return row_pool_.get(); }
  RotationWeights rotation(int layer) const;
  MlpWeightsView mlp(int layer) const { return mlp_[layer]; }
  MlpWeightsView query_mlp(int layer) const {
    return spec_.hash.query_weights ? query_mlp_[layer] : mlp_[layer];
  }
  SectionWeights sections(int layer) const;

 private:
  CudaModel(const ModelSpec& spec, Arena* arena);

  const ModelSpec spec_;
  const CodeTiling tiling_;
  std::unique_ptr<PagePool> code_pool_;
  std::unique_ptr<PagePool> row_pool_;
  const KeySections sections_;
  DeviceBuffer weights_;                 // everything below
  std::vector<const float*> rotations_;  // transposed [d][d], per layer
  std::vector<MlpWeightsView> mlp_;
  std::vector<MlpWeightsView> query_mlp_;
  std::vector<const float*> projections_;
  std::vector<const uint16_t*> channels_;
};

}  // namespace spillway::cuda
