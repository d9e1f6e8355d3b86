#include "gpu/device/model_methods.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "gpu/kernels/methods.h"
#include "gpu/methods/mlp.h"
#include "gpu/methods/request.h"
#include "gpu/methods/sections.h"
#include "host/base/status_macros.h"
#include "host/methods/lsh_sampling/projections.h"
#include "host/methods/weights/index_weights.h"

namespace spillway::cuda {
namespace {

// Numbers of models, so that a new model at a deleted one's address is not mistaken for it.
uint64_t NextNumber() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

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

class Methods final : public ModelMethods {
 public:
  Methods(const ModelSpec& spec, IndexWeights weights)
      : spec_(spec), number_(NextNumber()), from_(std::move(weights)) {
    shape_.plane_bits = spec.plane_bits();
    shape_.heads_per_code = spec.heads_per_code();
    shape_.mlp = spec.hash.kind == HashKind::kMlp;
    shape_.sections = KeySections::Of(spec);
    shape_.section_offset = CodeTiling::Of(spec).page_bytes();
    shape_.lsh_bits = spec.indices.lsh_bits;
  }

  void AddWeights(Packer& packer) override {
    AddMlps(from_.mlp, mlp_, packer);
    AddMlps(from_.query_mlp, query_mlp_, packer);
    if (spec_.indices.lsh_table_count > 0) {
      AddMatrices(spec_, MakeProjections, projections_, packer);
    }
    channels_.resize(from_.channels.size());
    for (size_t l = 0; l < from_.channels.size(); ++l) packer.Add(from_.channels[l], channels_[l]);
    from_ = {};
  }

  bool encodes() const override { return shape_.mlp || shape_.sections.bytes() > 0; }

  cudaError_t Encode(const EncodeWork& work, int layer, cudaStream_t stream) const override {
    if (shape_.mlp) {
      const cudaError_t error = LaunchEncodeMlp(work, mlp_[layer], stream);
      if (error != cudaSuccess) return error;
    }
    SectionWeights weights;
    weights.sections = shape_.sections;
    weights.offset = shape_.section_offset;
    weights.lsh_bits = shape_.lsh_bits;
    if (!channels_.empty()) weights.channels = channels_[layer];
    if (!projections_.empty()) weights.projections = projections_[layer];
    return LaunchEncodeSections(work, weights, stream);
  }

  bool TakesWholeQueries(const Policy& policy) const override { return HashesQueries(policy); }

  WaveMethods LayOut(const Policy& policy, int64_t unit_count, Carver& pinned,
                     Carver& workspace) const override {
    WaveMethods wave;
    if (!UsesMethods(policy)) return wave;
    wave.shape = &shape_;
    wave.model_number = number_;
    if (!ReadsRequests(policy)) return wave;
    wave.host_units = pinned.Take<MethodRequest>(unit_count);
    wave.units = workspace.Take<MethodRequest>(unit_count);
    wave.request_bytes = unit_count * static_cast<int64_t>(sizeof(MethodRequest));
    // The units' codes are contiguous, because one launch writes those of all units of a query.
    const int64_t words = HashesQueries(policy) ? QueryWords() : 0;
    const uint32_t* codes = workspace.Take<uint32_t>(unit_count * words);
    for (int64_t i = 0; i < unit_count && wave.host_units != nullptr; ++i) {
      wave.host_units[i] = {};
      if (words > 0) wave.host_units[i].query_codes = codes + i * words;
    }
    return wave;
  }

  void LayOut(const WaveMethods& wave, const Policy& policy, int64_t i, const MethodUnit& unit,
              const UnitRequest& request, Carver& workspace) const override {
    if (wave.request_bytes == 0) return;
    MethodRequest measured;
    MethodRequest& r = wave.host_units != nullptr ? wave.host_units[i] : measured;
    const int64_t padded = request.segments() * kSegmentTokens;
    if (!channels_.empty()) {
      r.channels = channels_[unit.layer] + unit.kv_head * shape_.sections.label_channels;
    }
    if (policy.tail == Tail::kLshSampling) {
      r.projections = projections_[unit.layer];
      r.centre = unit.centre;
      r.query_buckets = workspace.Take<uint16_t>(spec_.group() * shape_.sections.tables);
      r.takers = workspace.Take<uint16_t>(padded);
    }
    if (policy.candidate_selector.has_value()) {
      r.candidate_count = policy.CandidateCount(request.n);
      r.candidate_mask = workspace.Take<uint32_t>(padded / 32);
      r.first_selection = workspace.Take<FirstSelectionState>(1);
    }
  }

  cudaError_t LaunchAhead(const WaveMethods& wave, const Policy& policy, int layer, const float* q,
                          int64_t unit_count, cudaStream_t stream) const override {
    if (!HashesQueries(policy)) return cudaSuccess;
    const bool own = spec_.hash.query_weights;
    const MlpWeightsView& weights = own ? query_mlp_[layer] : mlp_[layer];
    const int heads_per_mlp = own ? 1 : spec_.heads_per_code();
    const int per_query = spec_.query_head_count;
    // The codes of all units begin where those of the first unit do.
    auto* const codes = const_cast<uint32_t*>(wave.host_units[0].query_codes);
    for (int64_t i = 0; i < unit_count / spec_.kv_head_count; ++i) {
      const cudaError_t error =
          LaunchMlpCodes(weights, spec_.head_dim, heads_per_mlp, q + i * per_query * spec_.head_dim,
                         per_query, codes + i * per_query * spec_.hash.hash_bits / 32, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  static bool Uses(const Policy& policy, Selector selector) {
    return policy.selector == selector || policy.candidate_selector == selector;
  }
  // Whether a wave runs any method's kernels.
  static bool UsesMethods(const Policy& policy) {
    const auto listed = [&](const SelectorKernels& kernels) {
      return policy.selector == kernels.selector;
    };
    return policy.candidate_selector.has_value() || FindTailKernels(policy.tail) != nullptr ||
           std::ranges::any_of(BuiltMethods().selectors, listed);
  }
  // Whether queries are hashed by MLPs.
  bool HashesQueries(const Policy& policy) const {
    return shape_.mlp && Uses(policy, Selector::kHamming);
  }
  // Whether one of the kernels reads a unit's MethodRequest.
  bool ReadsRequests(const Policy& policy) const {
    return policy.candidate_selector.has_value() || policy.tail == Tail::kLshSampling ||
           Uses(policy, Selector::kDoubleSparsity) || HashesQueries(policy);
  }
  // 32-bit words of a unit's query codes.
  int64_t QueryWords() const { return int64_t{spec_.heads_per_code()} * spec_.plane_words(); }

  const ModelSpec spec_;
  const uint64_t number_;
  MethodShape shape_;
  IndexWeights from_;  // until they are uploaded
  // In GPU memory.
  std::vector<MlpWeightsView> mlp_;
  std::vector<MlpWeightsView> query_mlp_;
  std::vector<const float*> projections_;
  std::vector<const uint16_t*> channels_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ModelMethods>> CreateModelMethods(
    const ModelSpec& spec, std::span<const std::byte> safetensors) {
  IndexWeights weights;
  if (spec.has_weights()) {
    ASSIGN_OR_RETURN(weights, LoadIndexWeights(spec, safetensors));
  }
  return std::make_unique<Methods>(spec, std::move(weights));
}

int64_t SectionBytes(const ModelSpec& spec) { return KeySections::Of(spec).bytes(); }

int64_t MethodWeightBytes(const ModelSpec& spec) {
  return ProjectionBytes(spec) + IndexWeights::BytesOf(spec);
}

}  // namespace spillway::cuda
