#include "host/cpu/score_pass.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "host/codes/mlp.h"
#include "host/core/score.h"
#include "host/cpu/parallel.h"

namespace spillway {
namespace {

// Histogram sets per block: the group's, and with top-p one per query head.
int SetsPerBlock(bool by_mass, int group) { return by_mass ? 1 + group : 1; }

void CountBins(const uint16_t* bins, int64_t count, uint32_t* histogram, int bin_count) {
  // Two interleaved histograms: neighbours often share a bin.
  std::vector<uint32_t> odd(bin_count, 0);
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    ++histogram[bins[i]];
    ++odd[bins[i + 1]];
  }
  if (i < count) ++histogram[bins[i]];
  for (int b = 0; b < bin_count; ++b) histogram[b] += odd[b];
}

}  // namespace

ScorePass::ScorePass(const AttendContext& context, int64_t query, int kv_head, int64_t begin,
                     int64_t end)
    : context_(context),
      query_(query),
      kv_head_(kv_head),
      begin_(begin),
      end_(end),
      base_(begin / (2 * kTileTokenCount) * (2 * kTileTokenCount)),
      first_block_(begin / kBlockTokens),
      block_count_((end - 1) / kBlockTokens - first_block_ + 1),
      by_mass_(context.work->policy.heavy_kind == HeavyKind::kMass) {}

void ScorePass::PrepareAsymmetric() {
  const ModelSpec& spec = context_.spec();
  const int d = spec.head_dim;
  const int dims = score_query_.layout.dims;
  const int levels_minus_1 = (1 << spec.hash.bits_per_dim) - 1;
  EncodeParams params = context_.model->encode_params(context_.layer);
  score_query_.row_count = spec.group();
  weights_.assign(static_cast<size_t>(spec.group()) * dims, 0);
  std::vector<float> rotated(d);
  for (int g = 0; g < spec.group(); ++g) {
    Rotate(params, q_.raw() + g * d, rotated.data());
    float largest = 0;
    for (float x : rotated) largest = std::max(largest, std::fabs(x));
    const float s = largest / 7.5f;
    int32_t total = 0;  // W = sum of the weights
    for (int j = 0; j < d && s > 0; ++j) {
      const float w = std::clamp(std::nearbyintf(rotated[j] / s - 0.5f), -8.0f, 7.0f);
      // (w + 1/2) s = (2 w + 1) s / 2: odd integers stand for the query.
      const int weight = 2 * static_cast<int>(w) + 1;
      weights_[static_cast<size_t>(g) * dims + j] = static_cast<int8_t>(2 * weight);
      total += weight;
    }
    // sum (2w+1)(2u - (2^B-1)) = 2 A - (2^B-1) W, and doubled weights sum to 2 A.
    score_query_.offset[g] = -levels_minus_1 * total;
    const float scale = static_cast<float>(spec.softmax_scale) * kExpLog2E;
    score_query_.coefficient[g] =
        std::min(scale * (s * (QuantiserStep(spec.hash.bits_per_dim) * 0.25f)), 1.0e30f);
  }
}

void ScorePass::PrepareHamming() {
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
      MlpCode(context_.model->mlp(context_.layer), mlp, q_.raw() + g * d, code.data());
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
  bin_count_ = bits * heads + 1;
}

absl::Status ScorePass::PageLogits(int64_t page, float* logits) const {
  if (context_.work->policy.selector == Selector::kAsymmetric) {
    AsymmetricLogits(score_query_, context_.index->codes[kv_head_].Page(page), logits);
    return absl::OkStatus();
  }
  const ModelSpec& spec = context_.spec();
  const LayerRows& rows = *context_.work->rows;
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

// Over every 64th page from the first candidate's on; of fewer than 1,024 pages
// over at least 16, or all.
absl::Status ScorePass::FindReferences() {
  const int group = context_.spec().group();
  const int64_t first = begin_ / kPageTokenCount;
  const int64_t last = (end_ - 1) / kPageTokenCount;
  const int64_t step = std::clamp<int64_t>((last - first) / 16, 1, 64);
  const int64_t count = (last - first) / step + 1;
  const bool oracle = context_.work->policy.selector == Selector::kOracle;
  std::vector<float> logits(count * group * kPageTokenCount);
  std::vector<absl::Status> statuses(count);
  ParallelFor(int64_t{0}, count, [&](int64_t i) {
    float* page = logits.data() + i * group * kPageTokenCount;
    statuses[i] = PageLogits(first + step * i, page);
    if (!oracle) return;
    for (float& l : std::span(page, group * kPageTokenCount)) l = OracleScore(l);
  });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  for (int g = 0; g < group; ++g) {
    // The candidates among the logits of each page.
    const auto for_each_page = [&](const auto& f) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (first + step * i) * kPageTokenCount;
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

absl::Status ScorePass::ScoreBlock(int64_t block) {
  const absl::Status cancelled = context_.CheckCancelled();
  if (!cancelled.ok()) return cancelled;
  const Selector selector = context_.work->policy.selector;
  const int group = context_.spec().group();
  const int64_t from = block_begin(block);
  const int64_t to = block_end(block);
  for (int64_t page = from / kPageTokenCount; page * kPageTokenCount < to; ++page) {
    const int64_t at = page * kPageTokenCount;
    // Kernels take tiles in pairs.
    const int tile_begin =
        static_cast<int>(std::max<int64_t>(from - at, 0) / (2 * kTileTokenCount) * 2);
    const int tile_end =
        static_cast<int>((std::min<int64_t>(to - at, kPageTokenCount) + 2 * kTileTokenCount - 1) /
                         (2 * kTileTokenCount) * 2);
    const int64_t slot = at + tile_begin * kTileTokenCount - base_;
    uint16_t* bins = workspace_->bins.data() + slot;
    uint16_t* head_bins[kGroupMax];
    for (int g = 0; by_mass_ && g < group; ++g) {
      head_bins[g] = workspace_->head_bins[g].data() + slot;
    }
    uint16_t* const* heads = by_mass_ ? head_bins : nullptr;
    if (selector == Selector::kOracle) {
      float logits[kGroupMax * kPageTokenCount] = {};
      absl::Status status = PageLogits(page, logits);
      if (!status.ok()) return status;
      ExactBins(score_query_, logits + tile_begin * kTileTokenCount, kPageTokenCount, group,
                (tile_end - tile_begin) * kTileTokenCount, bins, heads);
      continue;
    }
    const std::byte* codes = context_.index->codes[kv_head_].Page(page);
    if (selector == Selector::kHamming) {
      HammingBins(score_query_, codes, tile_begin, tile_end, bins);
    } else {
      AsymmetricBins(score_query_, codes, tile_begin, tile_end, bins, heads);
    }
  }
  CountBlock(block);
  return absl::OkStatus();
}

void ScorePass::CountBlock(int64_t block) {
  const int group = context_.spec().group();
  const int sets = SetsPerBlock(by_mass_, group);
  uint32_t* histogram = workspace_->histograms.data() + block * sets * bin_count_;
  std::fill_n(histogram, static_cast<size_t>(sets) * bin_count_, 0u);
  const int64_t from = block_begin(block) - base_;
  const int64_t count = block_end(block) - block_begin(block);
  CountBins(workspace_->bins.data() + from, count, histogram, bin_count_);
  for (int g = 0; g + 1 < sets; ++g) {
    CountBins(workspace_->head_bins[g].data() + from, count, histogram + (g + 1) * bin_count_,
              bin_count_);
  }
}

absl::Status ScorePass::Score() {
  const ModelSpec& spec = context_.spec();
  const Selector selector = context_.work->policy.selector;
  q_ = GroupQueries(context_, kv_head_, query_, query_ + 1);
  score_query_.layout = context_.model->layout();
  switch (selector) {
    case Selector::kAsymmetric:
      PrepareAsymmetric();
      break;
    case Selector::kHamming:
      PrepareHamming();
      break;
    default:
      score_query_.row_count = spec.group();
  }
  score_query_.weights = weights_.data();

  const int sets = SetsPerBlock(by_mass_, spec.group());
  // The last pair of tiles may be scored whole.
  auto lease =
      context_.workspaces->Acquire(end_ - base_ + 2 * kTileTokenCount, by_mass_ ? spec.group() : 0,
                                   block_count_ * sets * bin_count_);
  if (!lease.ok()) return lease.status();
  workspace_holder_.emplace(*std::move(lease));
  workspace_ = &**workspace_holder_;

  if (selector != Selector::kHamming) {
    absl::Status status = FindReferences();
    if (!status.ok()) return status;
  }
  std::vector<absl::Status> statuses(block_count_);
  ParallelFor(int64_t{0}, block_count_, [&](int64_t b) { statuses[b] = ScoreBlock(b); });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  histogram_ = SumHistograms(0);
  return absl::OkStatus();
}

std::vector<uint32_t> ScorePass::SumHistograms(int set) const {
  const int sets = SetsPerBlock(by_mass_, context_.spec().group());
  std::vector<uint32_t> total(bin_count_, 0);
  for (int64_t b = 0; b < block_count_; ++b) {
    const uint32_t* h = workspace_->histograms.data() + (b * sets + set) * bin_count_;
    for (int i = 0; i < bin_count_; ++i) total[i] += h[i];
  }
  return total;
}

void ScorePass::CollectAbove(int set, HeavyThreshold threshold,
                             std::vector<std::vector<uint32_t>>& found) const {
  const int sets = SetsPerBlock(by_mass_, context_.spec().group());
  const std::vector<uint16_t>& bins = set == 0 ? workspace_->bins : workspace_->head_bins[set - 1];
  // Of the threshold bin the most recent `take` are heavy: the first `skip`
  // in token order are not.
  std::vector<int64_t> skip(block_count_);
  int64_t in_bin = 0;
  for (int64_t b = 0; b < block_count_; ++b) {
    skip[b] = in_bin;
    in_bin += workspace_->histograms[(b * sets + set) * bin_count_ + threshold.bin];
  }
  for (int64_t& s : skip) s = in_bin - threshold.take - s;
  ParallelFor(int64_t{0}, block_count_, [&](int64_t b) {
    const int64_t from = block_begin(b);
    const auto positions = std::make_unique_for_overwrite<uint32_t[]>(block_end(b) - from);
    const uint16_t* first = bins.data() + from - base_;
    const int64_t count = FilterBins(first, block_end(b) - from,
                                     static_cast<uint16_t>(threshold.bin), positions.get());
    int64_t seen = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (first[positions[i]] == threshold.bin && seen++ < skip[b]) continue;
      found[b].push_back(static_cast<uint32_t>(from + positions[i]));
    }
  });
}

std::vector<uint32_t> ScorePass::TakeHeavy() {
  const Policy& policy = context_.work->policy;
  std::vector<std::vector<uint32_t>> found(block_count_);
  if (by_mass_) {
    for (int g = 0; g < context_.spec().group(); ++g) {
      CollectAbove(g + 1,
                   HeavyByMass(SumHistograms(g + 1), policy.heavy_mass, policy.heavy_floor,
                               policy.heavy_ceiling),
                   found);
    }
  } else {
    const int64_t count = policy.HeavyCount(context_.work->visible[query_]);
    CollectAbove(0, HeavyByCount(histogram_, count), found);
  }
  std::vector<uint32_t> heavy;
  for (std::vector<uint32_t>& block : found) {
    if (by_mass_) {  // the union over the group
      std::sort(block.begin(), block.end());
      block.erase(std::unique(block.begin(), block.end()), block.end());
    }
    heavy.insert(heavy.end(), block.begin(), block.end());
  }
  for (uint32_t token : heavy) {
    uint16_t& bin = workspace_->bins[token - base_];
    --histogram_[bin];
    bin = kHeavyBin;
  }
  return heavy;
}

}  // namespace spillway
