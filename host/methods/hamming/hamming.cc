#include "host/methods/hamming/hamming.h"

#include <utility>

#include "host/base/status_macros.h"
#include "host/cpu/cpu_method.h"
#include "host/methods/hamming/hamming_scorer.h"
#include "host/methods/hamming/mlp_index.h"

namespace spillway {
namespace {

// Only codes of MLPs need a section: the core stores the codes of a rotation.
int64_t SectionBytes(const ModelSpec& spec) {
  return spec.hash.kind == HashKind::kMlp ? CodeLayout::Of(spec).page_bytes() : 0;
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte> safetensors,
                                                    const CancelToken*) {
  ASSIGN_OR_RETURN(HashMlps mlps, LoadHashMlps(spec, safetensors));
  return std::make_unique<MlpIndex>(spec, std::move(mlps));
}

std::unique_ptr<KeyScorer> MakeHammingScorer(const ScoredKeys& keys) {
  return std::make_unique<HammingScorer>(keys);
}

constexpr SelectorMethod kSelector = {
    .selector = Selector::kHamming,
    .name = "hamming",
    .needs = "a model with a rotation or an MLP",
    .is_served = [](const ModelSpec& spec) { return spec.hash.kind != HashKind::kNone; },
    .ranked_by = RankedBy::kMatchingBits,
    .key_bits = [](const ModelSpec& spec) -> int64_t { return int64_t{32} * spec.plane_words(); },
    .guaranteed_token_count = methods::None,
    .reads_page_index = true,
    .default_order = 2};

constexpr std::string_view kModelFields[] = {"hash_weights.mlp"};

constexpr CpuMethod kCpu = {.section_bytes = SectionBytes,
                            .weight_bytes = HashMlps::BytesOf,
                            .make_index = MakeIndex,
                            .make_scorer = MakeHammingScorer};

}  // namespace

constexpr Method kHammingMethod = {
    .selector = &kSelector, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
