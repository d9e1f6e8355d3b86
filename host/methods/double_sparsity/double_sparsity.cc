#include "host/methods/double_sparsity/double_sparsity.h"

#include <utility>
#include <vector>

#include "host/base/status_macros.h"
#include "host/cpu/cpu_method.h"
#include "host/methods/int4_keys/int4_elements.h"
#include "host/methods/int4_keys/int4_scorer.h"
#include "host/methods/weights/index_weights.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {
namespace {

class LabelIndex final : public KeyIndex {
 public:
  LabelIndex(const ModelSpec& spec, LabelChannels channels)
      : spec_(spec), channels_(std::move(channels)) {}

  // The label channels of a KV head: [label_channel_count].
  std::span<const uint16_t> ChannelsOf(int layer, int kv_head) const {
    const size_t count = spec_.indices.label_channel_count;
    return std::span(channels_[layer]).subspan(kv_head * count, count);
  }
  int64_t bytes() const override {
    size_t count = 0;
    for (const auto& of_layer : channels_) count += of_layer.size();
    return static_cast<int64_t>(count * sizeof(uint16_t));
  }
  void Encode(const PageKeys& keys, std::byte* section) const override {
    StoreInt4Keys(spec_, keys, ChannelsOf(keys.layer, keys.kv_head), section);
  }

 private:
  const ModelSpec spec_;
  const LabelChannels channels_;
};

int64_t SectionBytes(const ModelSpec& spec) {
  return KeySections::Int4Bytes(spec.indices.label_channel_count);
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte> safetensors,
                                                    const CancelToken*) {
  ASSIGN_OR_RETURN(LabelChannels channels, LoadLabelChannels(spec, safetensors));
  return std::make_unique<LabelIndex>(spec, std::move(channels));
}

std::unique_ptr<KeyScorer> MakeLabelScorer(const ScoredKeys& keys) {
  const MethodIndex& of_model = keys.model().IndexOf(kDoubleSparsityMethod);
  const auto& index = static_cast<const LabelIndex&>(*of_model.index);
  return std::make_unique<Int4Scorer>(keys, of_model.offset_bytes,
                                      index.ChannelsOf(keys.context->layer, keys.kv_head));
}

constexpr SelectorMethod kSelector = {
    .selector = Selector::kDoubleSparsity,
    .name = "double_sparsity",
    .needs = "a model with key_indices.label_channel_count",
    .is_served = [](const ModelSpec& spec) { return spec.indices.label_channel_count > 0; },
    .ranked_by = RankedBy::kEstimatedLogit,
    .key_bits =
        [](const ModelSpec& spec) {
          return KeySections::Int4KeyBits(spec.indices.label_channel_count);
        },
    .guaranteed_token_count = methods::None,
    .reads_page_index = false,
    .default_order = 4};

constexpr std::string_view kModelFields[] = {"key_indices.label_channel_count"};

constexpr CpuMethod kCpu = {.section_bytes = SectionBytes,
                            .weight_bytes = LabelChannelBytes,
                            .make_index = MakeIndex,
                            .make_scorer = MakeLabelScorer};

}  // namespace

constexpr Method kDoubleSparsityMethod = {
    .selector = &kSelector, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
