#include "gpu/device/model.h"

#include <utility>

#include "gpu/cuda/stream.h"
#include "gpu/device/packer.h"
#include "gpu/kernels/resident.h"
#include "host/base/status_macros.h"
#include "host/codes/rotation.h"

namespace spillway::cuda {

namespace {

std::vector<float> TransposedRotation(const ModelSpec& spec, int layer) {
  const int d = spec.head_dim;
  const std::vector<float> p = MakeRotation(d, spec.hash.seed, spec.first_layer + layer);
  std::vector<float> transposed(p.size());
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) transposed[i * d + j] = p[j * d + i];
  }
  return transposed;
}

}  // namespace

CudaModel::CudaModel(const ModelSpec& spec, Arena* arena, SlabLimit* copy_limit,
                     std::unique_ptr<ModelMethods> methods)
    : spec_(spec),
      tiling_(CodeTiling::Of(spec)),
      copy_limit_(copy_limit),
      copy_layers_(std::make_unique<CopyLayers>(spec.layer_count)),
      methods_(std::move(methods)) {
  if (copy_limit != nullptr) {
    const int64_t page_bytes = kPageTokenCount * spec.row_bytes();
    const auto states = std::make_shared<PageStates>(arena, page_bytes);
    for (int l = 0; l < spec.layer_count; ++l) {
      copies_.push_back(std::make_unique<PagePool>(arena, page_bytes, copy_limit, states));
    }
  }
  if (!spec.has_index()) return;
  code_pool_ = std::make_unique<PagePool>(arena, IndexPageBytes(spec));
  row_pool_ = std::make_unique<PagePool>(arena, kResidentPageRows * spec.row_bytes());
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Create(const ModelSpec& spec, Arena* arena,
                                                             SlabLimit* copy_limit,
                                                             MemoryBudget* budget,
                                                             std::unique_ptr<ModelMethods> methods,
                                                             const CancelToken* cancel) {
  std::unique_ptr<CudaModel> model(new CudaModel(spec, arena, copy_limit, std::move(methods)));
  ASSIGN_OR_RETURN(model->half_appended_, Event::Create(/*timing=*/false));
  Packer packer;
  if (model->has_rotation()) {
    const auto make = [cancel](const ModelSpec& of, int layer) {
      if (cancel != nullptr && !cancel->Check().ok()) return std::vector<float>();
      return TransposedRotation(of, layer);
    };
    AddMatrices(spec, make, model->rotations_, packer);
  }
  packer.Add(model->spec_.sink_logits, model->sinks_);
  if (cancel != nullptr) RETURN_IF_ERROR(cancel->Check());
  if (model->methods_ != nullptr) model->methods_->AddWeights(packer);
  const auto bytes = static_cast<int64_t>(packer.bytes().size());
  if (bytes == 0) return model;
  ASSIGN_OR_RETURN(model->weights_, DeviceBuffer::Create(bytes, budget, "a model's weights"));
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      CopyToGpu(model->weights_.data(), packer.bytes().data(), static_cast<size_t>(bytes)));
  packer.Place(model->weights_.data());
  return model;
}

CopyLayers::Pages CudaModel::CopyPages(int64_t ahead) const {
  const PagePool& first = *copies_.front();
  const int64_t slab_bytes = first.slab_count() * kSlabBytes;
  CopyLayers::Pages pages;
  pages.of_first = first.used_page_count();
  const int64_t free_bytes = copy_limit_->free_bytes();
  pages.free = free_bytes / slab_bytes * first.pages_per_slab();
  for (size_t l = 1; l < copies_.size(); ++l) {
    pages.of_others += copies_[l]->used_page_count();
    // Not for what others need: only whole slabs are.
    if (free_bytes >= 0) pages.free += copies_[l]->spare_page_count();
  }
  pages.ahead = ahead;
  return pages;
}

int64_t CudaModel::HostBytesOf(const ModelSpec& spec) {
  const int64_t d = spec.head_dim;
  const int64_t rotation = spec.hash.kind == HashKind::kRotation ? d * d : 0;
  return 2 * (spec.layer_count * rotation * static_cast<int64_t>(sizeof(float)) +
              MethodWeightBytes(spec));
}

RotationWeights CudaModel::rotation(int layer) const {
  return {spec_.hash.bits_per_dim, spec_.hash.raw_keys, rotations_[layer]};
}

}  // namespace spillway::cuda
