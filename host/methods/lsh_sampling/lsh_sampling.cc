#include "host/methods/lsh_sampling/lsh_sampling.h"

#include "host/cpu/cpu_method.h"
#include "host/methods/lsh_sampling/lsh_index.h"
#include "host/methods/lsh_sampling/lsh_tail.h"
#include "host/methods/lsh_sampling/projections.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {
namespace {

int64_t SectionBytes(const ModelSpec& spec) {
  const KeySections sections = KeySections::Of(spec);
  return sections.bytes() - sections.buckets();
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte>,
                                                    const CancelToken* cancel) {
  return std::make_unique<LshIndex>(spec, cancel);
}

std::unique_ptr<MethodTail> MakeTail(const ScoredKeys& keys, const ScorePass& scores) {
  return std::make_unique<LshTail>(keys, scores);
}

constexpr TailMethod kTail = {
    .tail = Tail::kLshSampling,
    .name = "lsh_sampling",
    .needs = "a model with key_indices.lsh_table_count",
    .is_served = [](const ModelSpec& spec) { return spec.indices.lsh_table_count > 0; },
    .limited = false,
    .per_query_head = true};

constexpr std::string_view kModelFields[] = {"key_indices.lsh_table_count"};

constexpr CpuMethod kCpu = {.section_bytes = SectionBytes,
                            .weight_bytes = ProjectionBytes,
                            .make_index = MakeIndex,
                            .make_tail = MakeTail};

}  // namespace

constexpr Method kLshSamplingMethod = {.tail = &kTail, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
