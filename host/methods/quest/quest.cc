#include "host/methods/quest/quest.h"

#include "host/cpu/cpu_method.h"
#include "host/cpu/logit_scorer.h"
#include "host/methods/quest/page_bounds.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {
namespace {

class BoundIndex final : public KeyIndex {
 public:
  explicit BoundIndex(const ModelSpec& spec) : spec_(spec) {}

  int64_t bytes() const override { return 0; }
  void Encode(const PageKeys& keys, std::byte* section) const override {
    StoreBounds(spec_, keys, section);
  }

 private:
  const ModelSpec spec_;
};

// Scores keys by the upper limit that the bounds of their page give for logits.
class BoundScorer final : public LogitScorer {
 public:
  explicit BoundScorer(const ScoredKeys& keys)
      : LogitScorer(keys),
        offset_bytes_(keys.model().IndexOf(kQuestMethod).offset_bytes),
        bound_pages_(KeySections::Of(keys.spec()).bound_pages) {}

 private:
  absl::Status PageLogits(int64_t page, float* logits) const override {
    BoundLogits(keys_.spec().dtype, keys_.queries->rows(), bound_pages_,
                keys_.IndexPage(page) + offset_bytes_, logits);
    return absl::OkStatus();
  }

  const int64_t offset_bytes_;
  const int bound_pages_;
};

int64_t SectionBytes(const ModelSpec& spec) {
  const KeySections sections = KeySections::Of(spec);
  return sections.buckets() - sections.bounds();
}

absl::StatusOr<std::unique_ptr<KeyIndex>> MakeIndex(const ModelSpec& spec,
                                                    std::span<const std::byte>,
                                                    const CancelToken*) {
  return std::make_unique<BoundIndex>(spec);
}

std::unique_ptr<KeyScorer> MakeBoundScorer(const ScoredKeys& keys) {
  return std::make_unique<BoundScorer>(keys);
}

constexpr SelectorMethod kSelector = {
    .selector = Selector::kQuest,
    .name = "quest",
    .needs = "a model with key_indices.quest_page_token_count",
    .is_served = [](const ModelSpec& spec) { return spec.indices.quest_page_token_count > 0; },
    .ranked_by = RankedBy::kLogitBound,
    .key_bits = [](const ModelSpec& spec) -> int64_t {
      return int64_t{16} * spec.head_dim * DTypeBytes(spec.dtype) /
             spec.indices.quest_page_token_count;
    },
    .guaranteed_token_count = methods::None,
    .reads_page_index = false,
    .default_order = 5};

constexpr std::string_view kModelFields[] = {"key_indices.quest_page_token_count"};

constexpr CpuMethod kCpu = {
    .section_bytes = SectionBytes, .make_index = MakeIndex, .make_scorer = MakeBoundScorer};

}  // namespace

constexpr Method kQuestMethod = {
    .selector = &kSelector, .model_fields = kModelFields, .cpu = &kCpu};

}  // namespace spillway
