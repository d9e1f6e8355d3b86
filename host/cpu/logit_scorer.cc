#include "host/cpu/logit_scorer.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/core/reference_pages.h"
#include "host/core/score.h"
#include "host/cpu/decoded_rows.h"

namespace spillway {

absl::Status FindReferences(const ScoredKeys& keys, ReferenceLogits page_logits,
                            std::span<const float> centre_logits, ScoreReferences& references) {
  const int group = keys.spec().group();
  const ReferencePages pages = ReferencePages::Of(keys.begin, keys.end);
  const int64_t count = pages.count;
  std::vector<float> logits(count * group * kPageTokenCount);
  std::vector<absl::Status> statuses(count);
  ParallelFor(int64_t{0}, count, [&](int64_t i) {
    statuses[i] = page_logits(pages.page(i), pages.page(std::min(i + 1, count - 1)),
                              logits.data() + i * group * kPageTokenCount);
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  for (int g = 0; g < group; ++g) {
    // Calls f(logits of the scored tokens, their number) for each page of the sample.
    const auto for_each_page = [&](const auto& f) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = pages.page(i) * kPageTokenCount;
        const int64_t from = std::max<int64_t>(keys.begin - at, 0);
        const int64_t to = std::min<int64_t>(keys.end - at, kPageTokenCount);
        f(logits.data() + (i * group + g) * kPageTokenCount + from, to - from);
      }
    };
    float max = -std::numeric_limits<float>::infinity();
    for_each_page([&](const float* l, int64_t n) { max = MaxLogit(l, n, max); });
    for (size_t i = g; i < centre_logits.size(); i += group) max = std::max(max, centre_logits[i]);
    uint64_t mass = 0;
    for_each_page([&](const float* l, int64_t n) { mass += SumScoreMass(l, n, max); });
    for (size_t i = g; i < centre_logits.size(); i += group) {
      mass += CentreMass(centre_logits[i], max);
    }
    references.reference[g] = max;
    references.head_weight[g] = ScoreHeadWeight(mass);
  }
  return absl::OkStatus();
}

absl::Status LogitScorer::Prepare() {
  return FindReferences(
      keys_,
      [&](int64_t page, int64_t, float* logits) {
        RETURN_IF_ERROR(PageLogits(page, logits));
        for (float& l : std::span(logits, keys_.spec().group() * kPageTokenCount)) {
          l = OracleScore(l);
        }
        return absl::OkStatus();
      },
      {}, references_);
}

absl::Status LogitScorer::Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                               uint16_t* const* head_bins) const {
  float logits[kGroupMax * kPageTokenCount] = {};
  RETURN_IF_ERROR(PageLogits(page, logits));
  ExactBins(references_, logits + tile_begin * kTileTokenCount, kPageTokenCount,
            keys_.spec().group(), (tile_end - tile_begin) * kTileTokenCount, bins, head_bins);
  return absl::OkStatus();
}

absl::Status ExactScorer::PageLogits(int64_t page, float* logits) const {
  const AttendContext& context = *keys_.context;
  const ModelSpec& spec = context.spec();
  const LayerRows& rows = *context.attend->rows;
  const int group = spec.group();
  const int64_t first = page * kPageTokenCount;
  const int count = static_cast<int>(std::min<int64_t>(kPageTokenCount, keys_.end - first));
  const std::byte* data = rows.Page(keys_.kv_head, page);
  std::vector<float> block(static_cast<size_t>(group) * kRowBlock);
  DecodedRows decoded(rows.format());
  for (int at = 0; at < count; at += kRowBlock) {
    const int n = std::min(kRowBlock, count - at);
    const std::byte* pointers[kRowBlock];
    for (int i = 0; i < n; ++i) pointers[i] = data + (at + i) * rows.row_bytes();
    if (!RowLogits(spec.dtype, decoded.Of(pointers, nullptr, n), nullptr, n, keys_.queries->rows(),
                   block.data())) {
      std::vector<uint32_t> tokens(n);
      std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(first + at));
      for (int g = 0; g < group; ++g) {
        RETURN_IF_ERROR(
            NonFiniteLogit(context, keys_.kv_head, block.data() + g * kRowBlock, tokens.data(), n));
      }
    }
    for (int g = 0; g < group; ++g) {
      std::copy_n(block.data() + g * kRowBlock, n, logits + g * kPageTokenCount + at);
    }
  }
  return absl::OkStatus();
}

}  // namespace spillway
