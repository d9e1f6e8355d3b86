#include "host/cpu/score_pass.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

void CountBins(const uint16_t* bins, int64_t count, uint32_t* histogram, int bin_count) {
  // Two histograms in turn: neighbours often share a bin, and each count would wait for the one
  // before.
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

ScorePass::ScorePass(const ScoredKeys& keys, Selector selector, bool by_mass, bool with_levels)
    : keys_(keys),
      by_mass_(by_mass),
      with_levels_(with_levels),
      weighs_(WeighsValues(selector, keys.spec())),
      usual_level_(weighs_ ? UsualLevel(ClosedPages(keys.context->attend->visible[keys.query]),
                                        [&](int64_t page) { return keys.Level(page); })
                           : 0),
      begin_(keys.begin),
      end_(keys.end),
      base_(begin_ / (2 * kTileTokenCount) * (2 * kTileTokenCount)),
      first_block_(begin_ / kBlockTokens),
      block_count_((end_ - 1) / kBlockTokens - first_block_ + 1) {}

absl::Status ScorePass::ScoreBlock(const KeyScorer& scorer, int64_t block) {
  RETURN_IF_ERROR(keys_.context->CheckCancelled());
  const int group = keys_.spec().group();
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
    uint16_t* head_bins[kGroupMax];
    for (int g = 0; by_mass_ && g < group; ++g) {
      head_bins[g] = workspace_->head_bins[g].data() + slot;
    }
    uint16_t* const bins = workspace_->bins.data() + slot;
    RETURN_IF_ERROR(scorer.Bins(page, tile_begin, tile_end, bins, by_mass_ ? head_bins : nullptr));
    if (weighs_) WeighPage(page, tile_begin, tile_end, bins, head_bins);
  }
  CountBlock(block);
  return absl::OkStatus();
}

void ScorePass::WeighPage(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                          uint16_t* const* head_bins) const {
  const uint8_t* norms = keys_.Norms(page) + tile_begin * kTileTokenCount;
  const int count = (tile_end - tile_begin) * kTileTokenCount;
  WeighBins(norms, RaiseOf(keys_.Level(page), usual_level_), count, bins);
  if (!by_mass_ || std::memchr(norms, kStrayNorm, count) == nullptr) return;
  for (int g = 0; g < keys_.spec().group(); ++g) {
    for (int i = 0; i < count; ++i) {
      if (norms[i] == kStrayNorm) head_bins[g][i] = kNotFoundBin;
    }
  }
}

void ScorePass::CountBlock(int64_t block) {
  uint32_t* histogram = workspace_->histograms.data() + block * sets() * bin_count_;
  std::fill_n(histogram, static_cast<size_t>(sets()) * bin_count_, 0u);
  const int64_t from = block_begin(block) - base_;
  const int64_t count = block_end(block) - block_begin(block);
  CountBins(workspace_->bins.data() + from, count, histogram, bin_count_);
  for (int g = 0; g + 1 < sets(); ++g) {
    CountBins(workspace_->head_bins[g].data() + from, count, histogram + (g + 1) * bin_count_,
              bin_count_);
  }
}

absl::Status ScorePass::Score(KeyScorer& scorer) {
  // Before this pass has a workspace: the pass of a first selection takes one of its own here.
  RETURN_IF_ERROR(scorer.Prepare());
  bin_count_ = scorer.bin_count();
  // With room for the last pair of tiles, which is scored whole.
  ASSIGN_OR_RETURN(WorkspacePool::Lease lease,
                   keys_.context->workspaces->Acquire(
                       end_ - base_ + 2 * kTileTokenCount, by_mass_ ? keys_.spec().group() : 0,
                       block_count_ * sets() * bin_count_,
                       with_levels_ ? page_count() * keys_.spec().group() * kPageTokenCount : 0));
  workspace_holder_.emplace(std::move(lease));
  workspace_ = &**workspace_holder_;
  if (with_levels_) level_terms_ = scorer.KeepLevels(workspace_->levels.data());
  std::vector<absl::Status> statuses(block_count_);
  do {
    ParallelFor(int64_t{0}, block_count_, [&](int64_t b) { statuses[b] = ScoreBlock(scorer, b); });
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  } while (scorer.Reweigh());
  histogram_ = SumHistograms(0);
  return absl::OkStatus();
}

std::vector<uint32_t> ScorePass::SumHistograms(int set) const {
  std::vector<uint32_t> total(bin_count_, 0);
  for (int64_t b = 0; b < block_count_; ++b) {
    const uint32_t* h = workspace_->histograms.data() + (b * sets() + set) * bin_count_;
    for (int i = 0; i < bin_count_; ++i) total[i] += h[i];
  }
  return total;
}

void ScorePass::CollectAbove(int set, HeavyThreshold threshold, FoundTokens& found) const {
  const std::vector<uint16_t>& bins = set == 0 ? workspace_->bins : workspace_->head_bins[set - 1];
  // In the threshold bin, the most recent `take` tokens are heavy. The first `skip` tokens of a
  // block in that bin are not.
  std::vector<int64_t> skip(block_count_);
  int64_t in_bin = 0;
  for (int64_t b = 0; b < block_count_; ++b) {
    skip[b] = in_bin;
    in_bin += workspace_->histograms[(b * sets() + set) * bin_count_ + threshold.bin];
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

std::vector<uint32_t> ScorePass::Highest(int64_t count) const {
  FoundTokens found(block_count_);
  CollectAbove(0, HeavyByCount(histogram_, count), found);
  std::vector<uint32_t> tokens;
  for (const std::vector<uint32_t>& block : found) {
    tokens.insert(tokens.end(), block.begin(), block.end());
  }
  return tokens;
}

std::vector<uint32_t> ScorePass::TakeHeavy(const HeavySet& set) {
  const Policy& policy = keys_.context->attend->policy;
  FoundTokens found(block_count_);
  if (by_mass_) {
    for (int g = 0; g < keys_.spec().group(); ++g) {
      CollectAbove(g + 1,
                   HeavyByMass(SumHistograms(g + 1), policy.heavy_mass, policy.heavy_floor,
                               policy.heavy_ceiling),
                   found);
    }
    if (set.strays > 0) CollectAbove(0, {kStrayBin, set.strays}, found);
  } else {
    CollectAbove(0, HeavyByCount(histogram_, set.count()), found);
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
    if (level_terms_.references == nullptr) continue;
    for (int g = 0; g < keys_.spec().group(); ++g) {
      workspace_->levels[LevelAt(token, g)] = 0;
    }
  }
  return heavy;
}

}  // namespace spillway
