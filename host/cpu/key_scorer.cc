#include "host/cpu/key_scorer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "host/base/parallel.h"
#include "host/codes/mlp.h"
#include "host/core/histogram.h"
#include "host/core/quantiser.h"
#include "host/core/query_code.h"
#include "host/core/reference_pages.h"
#include "host/core/score.h"

namespace spillway {

KeyScorer::KeyScorer(const AttendContext& context, Selector selector, const GroupQueries& queries,
                     int kv_head, int64_t begin, int64_t end)
    : context_(context),
      selector_(selector),
      q_(queries),
      kv_head_(kv_head),
      begin_(begin),
      end_(end),
      bin_count_(kScoreBinCount) {}

void KeyScorer::PrepareAsymmetric() {
  const ModelSpec& spec = context_.spec();
  const int d = spec.head_dim;
  const int dims = score_query_.layout.dims;
  EncodeParams params = context_.model->encode_params(context_.layer);
  score_query_.row_count = spec.group();
  weights_.assign(static_cast<size_t>(spec.group()) * dims, 0);
  std::vector<float> rotated(d);
  for (int g = 0; g < spec.group(); ++g) {
    Rotate(params, q_.raw() + g * d, rotated.data());
    float largest = 0;
    for (float x : rotated) largest = std::max(largest, std::fabs(x));
    const float step = QueryStep(largest);
    int32_t weight_sum = 0;
    for (int j = 0; j < d && step > 0; ++j) {
      const int weight = QueryWeight(QueryLevel(rotated[j], step));
      weights_[static_cast<size_t>(g) * dims + j] = static_cast<int8_t>(2 * weight);
      weight_sum += weight;
    }
    score_query_.offset[g] = QueryOffset(spec.hash.bits_per_dim, weight_sum);
    score_query_.coefficient[g] = QueryCoefficient(static_cast<float>(spec.softmax_scale), step,
                                                   QuantiserStep(spec.hash.bits_per_dim));
  }
}

void KeyScorer::PrepareHamming() {
  const ModelSpec& spec = context_.spec();
  const int d = spec.head_dim;
  const int words = spec.plane_words();
  const int bits = spec.plane_bits();
  const int heads = spec.heads_per_code();
  score_query_.row_count = 1;
  std::vector<int> set(words * 32, 0);  // query heads whose bit is 1
  std::vector<float> rotated(d);
  std::vector<uint32_t> code(words);
  for (int g = 0; g < spec.group(); ++g) {
    if (spec.hash.kind == HashKind::kMlp) {
      const int key_code = g / heads;  // that the head compares its own with
      const int mlp = kv_head_ * spec.key_code_count() + key_code;
      MlpCode(context_.model->query_mlp(context_.layer),
              spec.hash.query_weights ? kv_head_ * spec.group() + g : mlp, q_.raw() + g * d,
              code.data());
      int* const of_code = set.data() + key_code * spec.hash.hash_bits;
      for (int j = 0; j < spec.hash.hash_bits; ++j) of_code[j] += (code[j / 32] >> (j % 32)) & 1u;
    } else {
      Rotate(context_.model->encode_params(context_.layer), q_.raw() + g * d, rotated.data());
      // As the codes of keys have it: a zero counts as positive.
      for (int j = 0; j < bits; ++j) set[j] += rotated[j] >= 0 ? 1 : 0;
    }
  }
  // matches = sum_j [k_j] c_j + [not k_j] (heads - c_j).
  weights_.assign(words * 32, 0);
  score_query_.offset[0] = 0;
  for (int j = 0; j < bits; ++j) {
    weights_[j] = static_cast<int8_t>(2 * set[j] - heads);
    score_query_.offset[0] += heads - set[j];
  }
  bin_count_ = spec.match_bin_count();
}

// Of the channels that the selector estimates from.
void KeyScorer::PrepareSketch() {
  const ModelSpec& spec = context_.spec();
  const int d = spec.head_dim;
  const int group = spec.group();
  const bool labels = selector_ == Selector::kDoubleSparsity;
  const int channels = labels ? spec.indices.label_channel_count : d;
  const uint16_t* chosen =
      labels ? context_.model->channels(context_.layer) + kv_head_ * channels : nullptr;
  const float* scaled = q_.rows().scaled;
  channel_queries_.resize(static_cast<size_t>(group) * channels);
  sketch_query_ = {group, channels, channel_queries_.data(), {}};
  for (int g = 0; g < group; ++g) {
    float sum = 0;
    for (int i = 0; i < channels; ++i) {
      const float x = scaled[g * d + (labels ? chosen[i] : i)];
      channel_queries_[g * channels + i] = x;
      sum += x;
    }
    sketch_query_.sum[g] = sum;
  }
}

const std::byte* KeyScorer::Codes(int64_t page) const {
  const PageTable& codes = context_.index->codes[kv_head_];
  return page < codes.page_count() ? codes.Page(page) : nullptr;
}

const std::byte* KeyScorer::Sections(int64_t page) const {
  return Codes(page) + context_.model->layout().page_bytes();
}

absl::Status KeyScorer::PageLogits(int64_t page, int64_t next, float* logits) const {
  const KeySections& sections = context_.model->sections();
  switch (selector_) {
    case Selector::kAsymmetric:
      AsymmetricLogits(score_query_, {Codes(page), Codes(next)}, logits);
      return absl::OkStatus();
    case Selector::kSketch:
      SketchLogits(sketch_query_, Sections(page) + sections.sketch(), logits);
      return absl::OkStatus();
    case Selector::kDoubleSparsity:
      SketchLogits(sketch_query_, Sections(page) + sections.labels(), logits);
      return absl::OkStatus();
    case Selector::kQuest:
      BoundLogits(context_.spec().dtype, q_.rows(), sections.bound_pages,
                  Sections(page) + sections.bounds(), logits);
      return absl::OkStatus();
    default:
      return ExactLogits(page, logits);
  }
}

absl::Status KeyScorer::ExactLogits(int64_t page, float* logits) const {
  const ModelSpec& spec = context_.spec();
  const LayerRows& rows = *context_.attend->rows;
  const int group = spec.group();
  const int64_t first = page * kPageTokenCount;
  const int count = static_cast<int>(std::min<int64_t>(kPageTokenCount, end_ - first));
  const std::byte* data = rows.Page(kv_head_, page);
  std::vector<float> block(static_cast<size_t>(group) * kRowBlock);
  for (int at = 0; at < count; at += kRowBlock) {
    const int n = std::min(kRowBlock, count - at);
    const std::byte* pointers[kRowBlock];
    for (int i = 0; i < n; ++i) pointers[i] = data + (at + i) * rows.row_bytes();
    if (!RowLogits(spec.dtype, pointers, nullptr, n, q_.rows(), block.data())) {
      std::vector<uint32_t> tokens(n);
      std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(first + at));
      for (int g = 0; g < group; ++g) {
        absl::Status status =
            NonFiniteLogit(context_, kv_head_, block.data() + g * kRowBlock, tokens.data(), n);
        if (!status.ok()) return status;
      }
    }
    for (int g = 0; g < group; ++g) {
      std::copy_n(block.data() + g * kRowBlock, n, logits + g * kPageTokenCount + at);
    }
  }
  return absl::OkStatus();
}

absl::Status KeyScorer::FindReferences() {
  const int group = context_.spec().group();
  const ReferencePages pages = ReferencePages::Of(begin_, end_);
  const int64_t count = pages.count;
  std::vector<float> logits(count * group * kPageTokenCount);
  std::vector<absl::Status> statuses(count);
  ParallelFor(int64_t{0}, count, [&](int64_t i) {
    float* page = logits.data() + i * group * kPageTokenCount;
    statuses[i] = PageLogits(pages.page(i), pages.page(std::min(i + 1, count - 1)), page);
    if (selector_ == Selector::kAsymmetric) return;
    for (float& l : std::span(page, group * kPageTokenCount)) l = OracleScore(l);
  });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  for (int g = 0; g < group; ++g) {
    // The candidates among the logits of each page.
    const auto for_each_page = [&](const auto& f) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = pages.page(i) * kPageTokenCount;
        const int64_t from = std::max<int64_t>(begin_ - at, 0);
        const int64_t to = std::min<int64_t>(end_ - at, kPageTokenCount);
        f(logits.data() + (i * group + g) * kPageTokenCount + from, to - from);
      }
    };
    float max = -std::numeric_limits<float>::infinity();
    for_each_page([&](const float* l, int64_t n) { max = MaxLogit(l, n, max); });
    uint64_t mass = 0;
    for_each_page([&](const float* l, int64_t n) { mass += SumScoreMass(l, n, max); });
    score_query_.reference[g] = max;
    score_query_.head_weight[g] = ScoreHeadWeight(mass);
  }
  return absl::OkStatus();
}

absl::Status KeyScorer::Prepare() {
  score_query_.layout = context_.model->layout();
  score_query_.row_count = context_.spec().group();
  switch (selector_) {
    case Selector::kAsymmetric:
      PrepareAsymmetric();
      break;
    case Selector::kHamming:
      PrepareHamming();
      break;
    case Selector::kSketch:
    case Selector::kDoubleSparsity:
      PrepareSketch();
      break;
    default:
      break;
  }
  score_query_.weights = weights_.data();
  return selector_ == Selector::kHamming ? absl::OkStatus() : FindReferences();
}

absl::Status KeyScorer::Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                             uint16_t* const* head_bins) const {
  if (selector_ == Selector::kHamming) {
    HammingBins(score_query_, {Codes(page), Codes(page + 1)}, tile_begin, tile_end, bins);
    return absl::OkStatus();
  }
  if (selector_ == Selector::kAsymmetric) {
    AsymmetricBins(score_query_, {Codes(page), Codes(page + 1)}, tile_begin, tile_end, bins,
                   head_bins);
    return absl::OkStatus();
  }
  float logits[kGroupMax * kPageTokenCount] = {};
  absl::Status status = PageLogits(page, page, logits);
  if (!status.ok()) return status;
  ExactBins(score_query_, logits + tile_begin * kTileTokenCount, kPageTokenCount,
            context_.spec().group(), (tile_end - tile_begin) * kTileTokenCount, bins, head_bins);
  return absl::OkStatus();
}

}  // namespace spillway
