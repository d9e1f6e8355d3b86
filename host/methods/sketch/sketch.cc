#include "host/methods/sketch/sketch.h"

#include <numeric>
#include <vector>

#include "host/base/elements.h"
#include "host/cpu/cpu_method.h"
#include "host/methods/sketch/sketch_keys.h"
#include "host/methods/sketch/sketch_scorer.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {
namespace {

class SketchIndex final : public KeyIndex {
 public:
  explicit SketchIndex(const ModelSpec& spec) : spec_(spec), channels_(spec.head_dim) {
    std::iota(channels_.begin(), channels_.end(), uint16_t{0});
  }

  std::span<const uint16_t> channels() const { return channels_; }
  int64_t bytes() const override { return 0; }
  void Encode(const PageKeys& keys, std::byte* section) const override {
    std::vector<float> x(spec_.head_dim);
    for (int t = keys.begin; t < keys.end; ++t) {
      ToFloat(spec_.dtype, keys.rows + t * spec_.row_bytes(), spec_.head_dim, x.data());
      StoreSketch(x.data(), channels_, t, section);
    }
  }

 private:
  const ModelSpec spec_;
  std::vector<uint16_t> channels_;  // all of them, in order
};

int64_t SectionBytes(const ModelSpec& spec) {
  return KeySections::SketchBytes(spec.indices.sketch ? spec.head_dim : 0);
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte>) {
  return std::make_unique<SketchIndex>(spec);
}

std::unique_ptr<KeyScorer> MakeSketchScorer(const ScoredKeys& keys) {
  const MethodIndex& of_model = keys.model().IndexOf(kSketchMethod);
  return std::make_unique<SketchScorer>(
      keys, of_model.offset_bytes, static_cast<const SketchIndex&>(*of_model.index).channels());
}

constexpr SelectorMethod kSelector = {
    .selector = Selector::kSketch,
    .name = "sketch",
    .needs = "a model with key_indices.sketch",
    .is_served = [](const ModelSpec& spec) { return spec.indices.sketch; },
    .ranked_by = RankedBy::kEstimatedLogit,
    .key_bits = [](const ModelSpec& spec) { return KeySections::SketchKeyBits(spec.head_dim); },
    .guaranteed_token_count = [](const ModelSpec&) { return methods::GuaranteedByBits(4); },
    .default_order = 3};

constexpr std::string_view kModelFields[] = {"key_indices.sketch"};

constexpr CpuMethod kCpu = {
    .section_bytes = SectionBytes, .make_index = MakeIndex, .make_scorer = MakeSketchScorer};

}  // namespace

constexpr Method kSketchMethod = {
    .selector = &kSelector, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
