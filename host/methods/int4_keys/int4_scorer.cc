#include "host/methods/int4_keys/int4_scorer.h"

namespace spillway {

Int4Scorer::Int4Scorer(const ScoredKeys& keys, int64_t section_offset,
                       std::span<const uint16_t> channels)
    : LogitScorer(keys),
      section_offset_(section_offset),
      channel_queries_(keys.spec().group() * channels.size()) {
  const int d = keys.spec().head_dim;
  const int group = keys.spec().group();
  const float* scaled = keys.queries->rows().scaled;
  query_ = {group, static_cast<int>(channels.size()), channel_queries_.data(), {}};
  float* q = channel_queries_.data();
  for (int g = 0; g < group; ++g) {
    float sum = 0;
    for (const uint16_t channel : channels) {
      const float x = scaled[g * d + channel];
      *q++ = x;
      sum += x;
    }
    query_.sum[g] = sum;
  }
}

absl::Status Int4Scorer::PageLogits(int64_t page, float* logits) const {
  Int4Logits(query_, keys_.IndexPage(page) + section_offset_, logits);
  return absl::OkStatus();
}

}  // namespace spillway
