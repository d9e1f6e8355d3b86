#include "tests/methods/example/prefix.h"

#include <algorithm>

#include "host/base/elements.h"
#include "host/cpu/cpu_method.h"
#include "host/cpu/decoded_rows.h"
#include "host/cpu/logit_scorer.h"

namespace spillway {
namespace {

constexpr int kPrefix = 16;  // no head has fewer elements

class PrefixScorer final : public LogitScorer {
 public:
  using LogitScorer::LogitScorer;

 private:
  absl::Status PageLogits(int64_t page, float* logits) const override {
    const LayerRows& rows = *keys_.context->attend->rows;
    const ModelSpec& spec = keys_.spec();
    const float* q = keys_.queries->rows().scaled;  // [G][d], times the softmax scale
    const int64_t count = std::min<int64_t>(kPageTokenCount, keys_.end - page * kPageTokenCount);
    const DecodedPage keys(rows, keys_.kv_head, page, count);  // in the dtype, also of 8 bits
    for (int64_t t = 0; t < count; ++t) {
      float key[kPrefix];
      ToFloat(spec.dtype, keys.rows() + t * spec.element_row_bytes(), kPrefix, key);
      for (int g = 0; g < spec.group(); ++g) {
        float logit = 0;
        for (int i = 0; i < kPrefix; ++i) logit += q[g * spec.head_dim + i] * key[i];
        logits[g * kPageTokenCount + t] = logit;
      }
    }
    return absl::OkStatus();
  }
};

std::unique_ptr<KeyScorer> MakePrefixScorer(const ScoredKeys& keys) {
  return std::make_unique<PrefixScorer>(keys);
}

constexpr SelectorMethod kSelector = {.selector = kPrefixSelector,
                                      .name = "prefix",
                                      .needs = "",
                                      .is_served = methods::Always,
                                      .ranked_by = RankedBy::kEstimatedLogit,
                                      .key_bits = [](const ModelSpec& spec) -> int64_t {
                                        return int64_t{8} * kPrefix * DTypeBytes(spec.dtype);
                                      },
                                      .guaranteed_token_count = methods::None,
                                      .reads_page_index = false,
                                      .default_order = 0};

constexpr CpuMethod kCpu = {.make_scorer = MakePrefixScorer};

}  // namespace

constexpr Method kPrefixMethod = {.selector = &kSelector, .cpu = &kCpu};

}  // namespace spillway
