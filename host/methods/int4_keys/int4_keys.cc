#include "host/methods/int4_keys/int4_keys.h"

#include <numeric>
#include <vector>

#include "host/cpu/cpu_method.h"
#include "host/methods/int4_keys/int4_elements.h"
#include "host/methods/int4_keys/int4_scorer.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {
namespace {

class Int4Index final : public KeyIndex {
 public:
  explicit Int4Index(const ModelSpec& spec) : spec_(spec), channels_(spec.head_dim) {
    std::iota(channels_.begin(), channels_.end(), uint16_t{0});
  }

  std::span<const uint16_t> channels() const { return channels_; }
  int64_t bytes() const override { return 0; }
  void Encode(const PageKeys& keys, std::byte* section) const override {
    StoreInt4Keys(spec_, keys, channels_, section);
  }

 private:
  const ModelSpec spec_;
  std::vector<uint16_t> channels_;  // all channels, in order
};

int64_t SectionBytes(const ModelSpec& spec) {
  return KeySections::Int4Bytes(spec.indices.int4_keys ? spec.head_dim : 0);
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte>,
                                                    const CancelToken*) {
  return std::make_unique<Int4Index>(spec);
}

std::unique_ptr<KeyScorer> MakeInt4Scorer(const ScoredKeys& keys) {
  const MethodIndex& of_model = keys.model().IndexOf(kInt4KeysMethod);
  return std::make_unique<Int4Scorer>(keys, of_model.offset_bytes,
                                      static_cast<const Int4Index&>(*of_model.index).channels());
}

constexpr SelectorMethod kSelector = {
    .selector = Selector::kInt4Keys,
    .name = "int4_keys",
    .needs = "a model with key_indices.int4_keys",
    .is_served = [](const ModelSpec& spec) { return spec.indices.int4_keys; },
    .ranked_by = RankedBy::kEstimatedLogit,
    .key_bits = [](const ModelSpec& spec) { return KeySections::Int4KeyBits(spec.head_dim); },
    .guaranteed_token_count = [](const ModelSpec&) -> int64_t { return 262144; },
    .reads_page_index = false,
    .default_order = 3};

constexpr std::string_view kModelFields[] = {"key_indices.int4_keys"};

constexpr CpuMethod kCpu = {
    .section_bytes = SectionBytes, .make_index = MakeIndex, .make_scorer = MakeInt4Scorer};

}  // namespace

constexpr Method kInt4KeysMethod = {
    .selector = &kSelector, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
