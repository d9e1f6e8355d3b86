#include "gpu/device/model.h"

#include <cstring>
#include <utility>

#include "gpu/kernels/attend.h"
#include "host/codes/rotation.h"
#include "tbb/parallel_for.h"

namespace spillway::cuda {

CudaModel::CudaModel(const ModelSpec& spec, Arena* arena)
    : spec_(spec), tiling_(CodeTiling::Of(spec)) {
  if (!has_codes()) return;
  code_pool_ = std::make_unique<PagePool>(arena, tiling_.page_bytes());
  row_pool_ = std::make_unique<PagePool>(arena, kResidentPageRows * spec.row_bytes());
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Create(const ModelSpec& spec, Arena* arena,
                                                             MemoryBudget* budget,
                                                             const IndexWeights& weights) {
  std::unique_ptr<CudaModel> model(new CudaModel(spec, arena));
  if (!model->has_codes()) return model;
  std::vector<float> all;
  // Places in `all` of each layer's w1, b1, w2 and b2; -1: none.
  std::vector<std::array<int64_t, 4>> places;
  if (spec.hash.kind == HashKind::kRotation) {
    const int d = spec.head_dim;
    const size_t size = static_cast<size_t>(d) * d;
    all.resize(size * spec.layer_count);
    tbb::parallel_for(0, spec.layer_count, [&](int layer) {
      const std::vector<float> p = MakeRotation(d, spec.hash.seed, layer);
      float* transposed = all.data() + layer * size;
      for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) transposed[i * d + j] = p[j * d + i];
      }
    });
  } else {
    for (const MlpLayer& layer : weights.mlp) {
      std::array<int64_t, 4>& at = places.emplace_back();
      int i = 0;
      for (const std::vector<float>* tensor : {&layer.w1, &layer.b1, &layer.w2, &layer.b2}) {
        at[i++] = tensor->empty() ? -1 : static_cast<int64_t>(all.size());
        all.insert(all.end(), tensor->begin(), tensor->end());
        all.resize((all.size() + 3) / 4 * 4);  // 16-byte aligned
      }
    }
  }
  const auto bytes = static_cast<int64_t>(all.size() * sizeof(float));
  absl::StatusOr<DeviceBuffer> buffer =
      DeviceBuffer::Create(bytes, budget, "a model's hash weights");
  if (!buffer.ok()) return buffer.status();
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(buffer->data(), all.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  model->weights_ = *std::move(buffer);
  const auto* base = reinterpret_cast<const float*>(model->weights_.data());
  for (const std::array<int64_t, 4>& at : places) {
    const auto tensor = [&](int i) { return at[i] < 0 ? nullptr : base + at[i]; };
    model->mlp_.push_back({spec.hash.hidden_dim, spec.hash.hash_bits, spec.hash.residual, tensor(0),
                           tensor(1), tensor(2), tensor(3)});
  }
  return model;
}

RotationWeights CudaModel::rotation(int layer) const {
  const int64_t size = int64_t{spec_.head_dim} * spec_.head_dim;
  return {spec_.hash.bits_per_dim, reinterpret_cast<const float*>(weights_.data()) + layer * size};
}

MlpWeightsView CudaModel::mlp(int layer) const { return mlp_[layer]; }

}  // namespace spillway::cuda
