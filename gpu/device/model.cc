#include "gpu/device/model.h"

#include <cstring>
#include <functional>
#include <utility>

#include "gpu/kernels/attend.h"
#include "host/codes/rotation.h"
#include "host/methods/lsh_sampling/projections.h"
#include "tbb/parallel_for.h"

namespace spillway::cuda {

namespace {

// Arrays next to each other, each 16-byte aligned, and where they will lie.
class Packer {
 public:
  // Sets `place` to the array's address once Place() is called.
  template <typename T>
  void Add(const std::vector<T>& values, const T*& place) {
    if (values.empty()) return;
    const size_t at = bytes_.size();
    bytes_.resize(at + (values.size() * sizeof(T) + 15) / 16 * 16);
    std::memcpy(bytes_.data() + at, values.data(), values.size() * sizeof(T));
    places_.push_back(
        [&place, at](const std::byte* base) { place = reinterpret_cast<const T*>(base + at); });
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void Place(const std::byte* base) const {
    for (const auto& place : places_) place(base);
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::function<void(const std::byte*)>> places_;
};

void AddMlps(const std::vector<MlpLayer>& layers, std::vector<MlpWeightsView>& views,
             Packer& packer) {
  views.resize(layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    const MlpLayer& from = layers[l];
    MlpWeightsView& to = views[l];
    to.hidden_dim = from.hidden_dim;
    to.hash_bits = from.hash_bits;
    to.residual = from.residual;
    packer.Add(from.w1, to.w1);
    packer.Add(from.b1, to.b1);
    packer.Add(from.w2, to.w2);
    packer.Add(from.b2, to.b2);
    packer.Add(from.w3, to.w3);
    packer.Add(from.b3, to.b3);
  }
}

std::vector<float> TransposedRotation(const ModelSpec& spec, int layer) {
  const int d = spec.head_dim;
  const std::vector<float> p = MakeRotation(d, spec.hash.seed, layer);
  std::vector<float> transposed(p.size());
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) transposed[i * d + j] = p[j * d + i];
  }
  return transposed;
}

// make(spec, layer) of all layers.
template <typename Make>
void AddMatrices(const ModelSpec& spec, Make make, std::vector<const float*>& places,
                 Packer& packer) {
  std::vector<std::vector<float>> matrices(spec.layer_count);
  tbb::parallel_for(0, spec.layer_count, [&](int layer) { matrices[layer] = make(spec, layer); });
  places.resize(matrices.size());
  for (size_t l = 0; l < matrices.size(); ++l) packer.Add(matrices[l], places[l]);
}

}  // namespace

CudaModel::CudaModel(const ModelSpec& spec, Arena* arena)
    : spec_(spec), tiling_(CodeTiling::Of(spec)), sections_(KeySections::Of(spec)) {
  if (!spec.has_index()) return;
  code_pool_ = std::make_unique<PagePool>(arena, page_bytes());
  row_pool_ = std::make_unique<PagePool>(arena, kResidentPageRows * spec.row_bytes());
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Create(const ModelSpec& spec, Arena* arena,
                                                             MemoryBudget* budget,
                                                             const IndexWeights& weights) {
  std::unique_ptr<CudaModel> model(new CudaModel(spec, arena));
  Packer packer;
  if (spec.hash.kind == HashKind::kRotation) {
    AddMatrices(spec, TransposedRotation, model->rotations_, packer);
  }
  AddMlps(weights.mlp, model->mlp_, packer);
  AddMlps(weights.query_mlp, model->query_mlp_, packer);
  if (spec.indices.lsh_table_count > 0) {
    AddMatrices(spec, MakeProjections, model->projections_, packer);
  }
  model->channels_.resize(weights.channels.size());
  for (size_t l = 0; l < weights.channels.size(); ++l) {
    packer.Add(weights.channels[l], model->channels_[l]);
  }
  const auto bytes = static_cast<int64_t>(packer.bytes().size());
  if (bytes == 0) return model;
  absl::StatusOr<DeviceBuffer> buffer =
      DeviceBuffer::Create(bytes, budget, "a model's hash weights");
  if (!buffer.ok()) return buffer.status();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpy(buffer->data(), packer.bytes().data(),
                                           static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  model->weights_ = *std::move(buffer);
  packer.Place(model->weights_.data());
  return model;
}

int64_t CudaModel::HostBytesOf(const ModelSpec& spec) {
  const int64_t d = spec.head_dim;
  const int64_t rotation = spec.hash.kind == HashKind::kRotation ? d * d : 0;
  const int64_t projections = int64_t{spec.indices.lsh_table_count} * spec.indices.lsh_bits * d;
  return 2 * (spec.layer_count * (rotation + projections) * static_cast<int64_t>(sizeof(float)) +
              IndexWeights::BytesOf(spec));
}

RotationWeights CudaModel::rotation(int layer) const {
  return {spec_.hash.bits_per_dim, rotations_[layer]};
}

SectionWeights CudaModel::sections(int layer) const {
  SectionWeights weights;
  weights.sections = sections_;
  weights.offset = tiling_.page_bytes();
  weights.lsh_bits = spec_.indices.lsh_bits;
  if (!channels_.empty()) weights.channels = channels_[layer];
  if (!projections_.empty()) weights.projections = projections_[layer];
  return weights;
}

}  // namespace spillway::cuda
